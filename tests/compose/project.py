"""A cluster of containers: docker-compose.yml as a project of its own, beside any other project on this machine."""

import json
import os
import subprocess
from dataclasses import dataclass
from uuid import uuid4

from tests.support.environments import ROOT

WORKERS = ("worker-1", "worker-2")
SERVICES = ("etcd", "registry", *WORKERS, "frontend")
COMMAND_S_MAX = 120.0
"""For commands that change or read containers. The longest waits for containers to stop: see stop_grace_period."""
BUILD_S_MAX = 1800.0
UP_S_MAX = 300.0
"""Until all containers are healthy, on a busy machine."""
LOG_LINES = 100
FREE_PORT = "127.0.0.1:0"
METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9090/metrics').read().decode())"
KILL = "import os, signal, sys; os.kill(int(sys.argv[1]), signal.SIGKILL)"
NEEDED = {
    # A command that succeeds if the requirement is met, and what to do otherwise.
    "docker --version": "install Docker: https://docs.docker.com/engine/install/",
    "docker compose version": "install Compose, version 2: https://docs.docker.com/compose/install/",
    "docker version --format {{.Server.Version}}": "start it: `sudo systemctl start docker`, or Docker Desktop; if "
    "it runs, see that you may use it: `sudo usermod -aG docker $USER`, then log in again",
}


def trouble() -> str | None:
    """Return why these tests cannot run here and what to do about it; None if they can."""
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
    """The frontend's addresses on this machine. `http`: a URL. `grpc`: host:port."""

    http: str
    grpc: str


@dataclass(frozen=True)
class State:
    """The state of a container. `health`: `starting`, `healthy` or `unhealthy`. `pid`: 0 if it does not run."""

    health: str
    exit_code: int
    pid: int
    restart_count: int


class Project:
    """Containers, a network and volumes under one name. Methods raise CalledProcessError and TimeoutExpired."""

    def __init__(self) -> None:
        self.name = f"unbroken-test-{uuid4().hex[:8]}"
        ports = {"HTTP_PORT": FREE_PORT, "GRPC_PORT": FREE_PORT}
        self._environment = os.environ | ports | {"COMPOSE_PROFILES": ""}

    def compose(self, *words: str, seconds_max: float = COMMAND_S_MAX) -> str:
        """Run `docker compose` and return its output. Progress and errors go to standard error."""
        file = str(ROOT / "docker-compose.yml")
        return self.docker("compose", "--file", file, "--project-name", self.name, *words, seconds_max=seconds_max)

    def docker(self, *words: str, seconds_max: float = COMMAND_S_MAX) -> str:
        """Run `docker` and return its output."""
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
        """Build the image from this tree, start all containers, and wait until they are healthy."""
        self.compose("up", "--build", "--detach", "--wait", seconds_max=BUILD_S_MAX + UP_S_MAX)

    def up(self) -> None:
        """Start the containers that do not run, and wait until all are healthy."""
        self.compose("up", "--detach", "--wait", seconds_max=UP_S_MAX)

    def down(self) -> None:
        """Remove everything but the image."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout=1")

    def logs(self) -> str:
        """Return the last lines of each container's log."""
        return self.compose("logs", "--no-color", f"--tail={LOG_LINES}")

    def published(self) -> Published:
        """Return the published ports, which change with each start."""
        http, grpc = (self.compose("port", "frontend", port) for port in ("8000", "50051"))
        return Published(f"http://{http}", grpc)

    def container(self, service: str) -> str:
        """Return the id of a service's container, running or not."""
        return self.compose("ps", "--all", "--quiet", service)

    def state(self, service: str) -> State:
        """Return the state of a service's container."""
        (details,) = json.loads(self.docker("inspect", self.container(service)))
        state = details["State"]
        return State(state["Health"]["Status"], state["ExitCode"], state["Pid"], details["RestartCount"])

    def metrics(self, worker: str) -> str:
        """Return a worker's Prometheus metrics. Only other containers can reach its port."""
        return self.compose("exec", "-T", worker, "python", "-c", METRICS)

    def kill_process(self, worker: str) -> None:
        """Kill a worker's process as the kernel does when memory runs out, without Docker's involvement.

        The command runs in a container that sees all processes of the engine's machine, which may not be this machine.
        """
        as_root = ("run", "--rm", "--pid=host", "--user=0", "--entrypoint=python")
        self.docker(*as_root, "unbroken", "-c", KILL, str(self.state(worker).pid))
