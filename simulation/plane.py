"""The processes of the product, in a simulated world."""

import asyncio
import importlib
from collections.abc import Collection
from itertools import count
from typing import Any

import structlog

from services.core import call
from services.frontend.server import Frontend, FrontendConfig
from services.frontend.session.session import WorkerSession
from services.registry.config import RegistryConfig
from services.registry.server import serve as serve_registry
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.server import Worker, WorkerConfig
from simulation.grpc.channel import Channel
from simulation.runtime.determinism import is_installed
from simulation.runtime.sockets import FcntlModule, SocketModule
from simulation.runtime.world import Process, World

REGISTRY_PORT = 30_000
FRONTEND_PORT = 31_000
WORKER_PORT = 32_000
FAULTY = frozenset({"worker broke the protocol", "bug in a session"})
"""What is logged only if something is wrong. So are all errors."""


def worker_port(name: str) -> int:
    """The port for gRPC of a worker."""
    return WORKER_PORT + 2 * int(name.partition("-")[2])


def install(world: World, excused: Collection[str] = ()) -> None:
    """Let the product's code run in this world. `excused`: what it may log although only faults make it do so."""
    assert is_installed(), "the product would run on the real clock"
    _replace("services.runtime.listen", socket=SocketModule(world))
    _replace("services.http.h1.exchange", fcntl=FcntlModule(world))
    _replace("grpc.aio", insecure_channel=Channel)
    _replace("services.core.call", _ids=call._random_ids())  # It keeps random ids in store,
    WorkerSession._numbers = count(1)  # and this what it has counted: a second run in a process would have others.
    structlog.get_config()["processors"][:] = [lambda _logger, level, event: _say(world, level, event, excused)]


def _replace(module: str, **replacements: Any) -> None:
    """Replace what a module has imported."""
    found = importlib.import_module(module)
    for name, replacement in replacements.items():
        assert hasattr(found, name), f"{module} has no {name} any more"
        setattr(found, name, replacement)


def _say(world: World, level: str, event: Any, excused: Collection[str]) -> Any:
    """Logs are lines of the trace."""
    is_faulty = level in {"error", "critical", "exception"} or event["event"] in FAULTY
    if is_faulty and event["event"] not in excused:
        world.problems.append(f"logged: {event}"[:2000])
    if level != "debug":
        name = "world" if world.current is None else world.current.name
        fields = " ".join(f"{key}={value}" for key, value in event.items() if key not in ("event", "config"))
        world.say(name, f"[{level}] {event['event']} {fields}")
    raise structlog.DropEvent


class Plane:
    """A registry, workers and frontends, each of which can be killed and started again at the same address."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stopping: dict[str, asyncio.Event] = {}

    def _start(self, name: str, run: Any) -> Process:
        async def main() -> None:
            stopping = self.stopping[name] = asyncio.Event()
            await run(stopping)

        return self.world.spawn(name, main)

    def _own(self, name: str, owner: Any) -> Any:
        self.world.processes[name].owner = owner
        return owner

    def start_registry(self) -> Process:
        async def run(stopping: asyncio.Event) -> None:
            config = RegistryConfig(listen=f"127.0.0.1:{REGISTRY_PORT}")
            await serve_registry(config, stopping)

        return self._start("registry", run)

    def start_worker(self, number: int, mocker: MockerConfig, **settings: Any) -> Process:
        async def run(stopping: asyncio.Event) -> None:
            config = WorkerConfig(
                listen=f"127.0.0.1:{WORKER_PORT + 2 * number}",
                session_listen=f"127.0.0.1:{WORKER_PORT + 2 * number + 1}",
                registries=(f"127.0.0.1:{REGISTRY_PORT}",),
                **settings,
            )
            worker = self._own(f"worker-{number}", Worker(MockerEngine(mocker), config))
            await worker.run(stopping)

        return self._start(f"worker-{number}", run)

    def start_frontend(self, number: int, **settings: Any) -> Process:
        async def run(stopping: asyncio.Event) -> None:
            config = FrontendConfig(
                http_listen=f"127.0.0.1:{FRONTEND_PORT + 2 * number}",
                grpc_listen=f"127.0.0.1:{FRONTEND_PORT + 2 * number + 1}",
                registries=(f"127.0.0.1:{REGISTRY_PORT}",),
                **settings,
            )
            await self._own(f"frontend-{number}", Frontend(config)).run(stopping)

        return self._start(f"frontend-{number}", run)

    def drain(self, process: Process) -> None:
        """As SIGTERM does."""
        if not process.is_dead and (stopping := self.stopping.get(process.name)) is not None:
            process.loop.call_soon(stopping.set)
