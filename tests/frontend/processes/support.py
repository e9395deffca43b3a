"""Processes of a frontend as their supervisor sees them, in one process with the test."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.core.gate import Gate
from services.frontend.control import Changes, LocalControl
from services.frontend.processes.ipc import SUPERVISOR_SOCKET, control_app, serve_control
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds

PREFIX = "p"


@contextmanager
def short_folder() -> Iterator[Path]:
    """The name of a socket may have 107 bytes, and those of pytest's folders take as many."""
    with tempfile.TemporaryDirectory(prefix="unbroken-test-") as folder:
        yield Path(folder)


class Hushed(LocalControl):
    """A process that answers while its event is set."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.asked_count = 0

    async def _wait_speaking(self) -> None:
        self.asked_count += 1
        await self.speaks.wait()

    async def exposition(self) -> bytes:
        await self._wait_speaking()
        return await super().exposition()

    async def cancel(self, request_id: str) -> int:
        await self._wait_speaking()
        return await super().cancel(request_id)

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        await self._wait_speaking()
        await super().set_thresholds(model, changes)


class Process:
    """One process: what it counts, whom it serves, and its thresholds."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.thresholds = BusyThresholds(AdmissionConfig())
        self.registry = CollectorRegistry()
        self.requests = Counter(f"{PREFIX}_requests", "Requests.", registry=self.registry)
        self.inflight = Gauge(f"{PREFIX}_inflight_requests", "Under way.", registry=self.registry)
        self.whole = Hushed(self.registry, self.gate, self.thresholds)

    @asynccontextmanager
    async def living(self, path: Path) -> AsyncIterator[None]:
        async with serve_control(control_app(self.whole), path):
            yield


@asynccontextmanager
async def supervised(answer_s_max: float) -> AsyncIterator[tuple[ProcessGroup, Path]]:
    """A group that answers, and its folder."""
    group = ProcessGroup(PREFIX, answer_s_max)
    with short_folder() as folder:
        async with serve_control(control_app(group, group.join), folder / SUPERVISOR_SOCKET):
            yield group, folder
