"""A cluster of containers: docker-compose.yml, run as a project of its own beside any other on this machine."""

import json
import os
import subprocess
from dataclasses import dataclass
from uuid import uuid4

from tests.support.environments import ROOT

WORKERS = ("worker-1", "worker-2")
SERVICES = ("etcd", "registry", *WORKERS, "frontend")
COMMAND_S_MAX = 120.0
"""For what changes or reads containers. The longest is the wait for their ends: see stop_grace_period."""
BUILD_S_MAX = 1800.0
UP_S_MAX = 300.0
"""Until all are healthy, on a machine that has something else to do."""
LOG_LINES = 100
FREE_PORT = "127.0.0.1:0"
METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9090/metrics').read().decode())"
KILL = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)"
NEEDED = {
    # A command that succeeds where it is there: what to do where it is not.
    "docker --version": "install Docker: https://docs.docker.com/engine/install/",
    "docker compose version": "install Compose, version 2: https://docs.docker.com/compose/install/",
    "docker version --format {{.Server.Version}}": "start it: `sudo systemctl start docker`, or Docker Desktop; if "
    "it runs, see that you may use it: `sudo usermod -aG docker $USER`, then log in again",
}


def trouble() -> str | None:
    """Why nothing can be tried here, and what to do about it; None if nothing is in the way."""
    for command, advice in NEEDED.items():
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=COMMAND_S_MAX)
            complaint = (done.stderr or done.stdout).strip() if done.returncode else None
        except FileNotFoundError as error:
            complaint = str(error)
        if complaint is not None:
            return f"`{command}` fails: {complaint}\nWhat to do: {advice}."
    return None


@dataclass(frozen=True)
class Published:
    """Where clients on this machine reach the frontend. http: a URL; grpc: host:port."""

    http: str
    grpc: str


@dataclass(frozen=True)
class State:
    """How a container is. health: `starting`, `healthy` or `unhealthy`; pid: 0 if it is dead."""

    health: str
    exit_code: int
    pid: int
    restart_count: int


class Project:
    """Containers, a network and volumes under one name. Its methods raise CalledProcessError and TimeoutExpired."""

    def __init__(self) -> None:
        self.name = f"unbroken-test-{uuid4().hex[:8]}"
        ports = {"HTTP_PORT": FREE_PORT, "GRPC_PORT": FREE_PORT}
        self._environment = os.environ | ports | {"COMPOSE_PROFILES": ""}

    def compose(self, *words: str, seconds_max: float = COMMAND_S_MAX) -> str:
        """What `docker compose` prints. What it says of its progress and of errors goes to our standard error."""
        file = str(ROOT / "docker-compose.yml")
        return self.docker("compose", "--file", file, "--project-name", self.name, *words, seconds_max=seconds_max)

    def docker(self, *words: str, seconds_max: float = COMMAND_S_MAX) -> str:
        """The same of `docker`."""
        done = subprocess.run(
            ["docker", *words],
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=seconds_max,
        )
        return done.stdout.strip()

    def begin(self) -> None:
        """Build the image from this tree, start all, and wait until they are healthy."""
        self.compose("up", "--build", "--detach", "--wait", seconds_max=BUILD_S_MAX + UP_S_MAX)

    def up(self) -> None:
        """Start what does not run, and wait until all are healthy."""
        self.compose("up", "--detach", "--wait", seconds_max=UP_S_MAX)

    def down(self) -> None:
        """Leave nothing behind but the image."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=1")

    def logs(self) -> str:
        """The last lines of each container."""
        return self.compose("logs", "--no-color", f"--tail={LOG_LINES}")

    def published(self) -> Published:
        """Its ports are other ones after each start."""
        http, grpc = (self.compose("port", "frontend", port) for port in ("8000", "50051"))
        return Published(f"http://{http}", grpc)

    def container(self, service: str) -> str:
        """The id of its container, dead or alive."""
        return self.compose("ps", "--all", "--quiet", service)

    def state(self, service: str) -> State:
        """How it is now."""
        (told,) = json.loads(self.docker("inspect", self.container(service)))
        state = told["State"]
        return State(state["Health"]["Status"], state["ExitCode"], state["Pid"], told["RestartCount"])

    def metrics(self, worker: str) -> str:
        """What a worker tells Prometheus. Its port can be reached from other containers only."""
        return self.compose("exec", "-T", worker, "python", "-c", METRICS)

    def kill_process(self, worker: str) -> None:
        """As the kernel does it where memory runs out: Docker has no part in it.

        It is done in a container that sees all processes of the engine's machine, which may be another one than ours.
        """
        as_root = ("run", "--rm", "--pid=host", "--user=0", "--entrypoint=python")
        self.docker(*as_root, "unbroken", "-c", KILL, str(self.state(worker).pid))
