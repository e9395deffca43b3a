"""Stand-ins for the processes of a frontend, within the process of the test."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.core.gate import Gate
from services.core.tenant import Tenant
from services.frontend.control import Changes, LocalControl
from services.frontend.processes.ipc import SUPERVISOR_SOCKET, control_app, serve_control
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds

PREFIX = "p"


@contextmanager
def short_folder() -> Iterator[Path]:
    """A temporary folder with a short path: the path of a socket has at most 107 bytes, and pytest's are longer."""
    with tempfile.TemporaryDirectory(prefix="unbroken-test-") as folder:
        yield Path(folder)


class PausableControl(LocalControl):
    """The control of a process, which answers only while `may_answer` is set."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.call_count = 0

    async def _wait_allowed(self) -> None:
        self.call_count += 1
        await self.may_answer.wait()

    async def exposition(self) -> bytes:
        await self._wait_allowed()
        return await super().exposition()

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        await self._wait_allowed()
        return await super().cancel(request_id, tenant)

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        await self._wait_allowed()
        await super().set_thresholds(model, changes)


class Process:
    """One process with its metrics, its running requests and its thresholds."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.thresholds = BusyThresholds(AdmissionConfig())
        self.registry = CollectorRegistry()
        self.requests = Counter(f"{PREFIX}_requests", "Requests.", registry=self.registry)
        self.inflight = Gauge(f"{PREFIX}_inflight_requests", "Under way.", registry=self.registry)
        self.control = PausableControl(self.registry, self.gate, self.thresholds)

    @asynccontextmanager
    async def serving(self, path: Path) -> AsyncIterator[None]:
        async with serve_control(control_app(self.control), path):
            yield


@asynccontextmanager
async def supervised(answer_s_max: float) -> AsyncIterator[tuple[ProcessGroup, Path]]:
    """A process group that serves its control, and the folder of its sockets."""
    group = ProcessGroup(PREFIX, answer_s_max)
    with short_folder() as folder:
        async with serve_control(control_app(group, group.join), folder / SUPERVISOR_SOCKET):
            yield group, folder
