"""The processes of one frontend, addressed as one: the supervisor asks all of them and combines their answers."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from services.core.errors import Failure, Reason
from services.core.tenant import Tenant
from services.frontend.control import Changes
from services.frontend.processes.ipc import PROCESS_ANSWER_S_MAX, JoinResponse, ProcessGone, RemoteControl
from services.frontend.processes.metrics_merge import Families, MergedMetrics, kept_after_exit, merged, parsed

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class _Answers(Generic[T]):
    """What the running processes answered, and the processes that did not answer in time."""

    by_process: dict["_Process", T]
    silent: Sequence["_Process"]


@dataclass(eq=False)
class _Process:
    """A process that is believed to run. last: the metrics that it last exposed."""

    name: str
    pid: int
    control: RemoteControl
    last: Families = field(default_factory=list)


class ProcessGroup:
    """Implements FrontendControl over all processes. A process that has exited is removed; its counters are kept."""

    def __init__(self, metrics_prefix: str, answer_s_max: float = PROCESS_ANSWER_S_MAX) -> None:
        """answer_s_max: how long to wait for the answer of one process."""
        self._answer_s_max = answer_s_max
        self._prefix = metrics_prefix
        self._processes: list[_Process] = []
        self._names: set[str] = set()  # Names of all processes that ever joined.
        self._exited: Families = []  # The merged metrics of processes that have exited.
        self._changes: dict[str, dict[str, object]] = {}  # Threshold changes by model name.
        self._scraping = asyncio.Lock()  # An older exposition must not replace a newer one in `_Process.last`.
        self._setting = asyncio.Lock()  # Every process gets the same changes in the same order.

    def join(self, name: str, path: Path, pid: int) -> JoinResponse:
        """Add the process that answers at `path`. Any earlier process of that name has exited; the next request to it
        removes it."""
        response = JoinResponse(dict(self._changes), is_successor=name in self._names)
        self._names.add(name)
        self._processes.append(_Process(name, pid, RemoteControl(path, self._answer_s_max)))
        return response

    async def exposition(self) -> bytes:
        """The merged metrics: counters of all processes, exited ones included, and gauges of those that answer."""
        async with self._scraping:
            answers = (await self._ask_all(RemoteControl.exposition)).by_process
            for process, exposition in answers.items():
                process.last = parsed(exposition)
            silent = [process for process in self._processes if process not in answers]
            current = [*(one.last for one in answers), *(kept_after_exit(one.last, self._prefix) for one in silent)]
            families = merged([self._exited, *current], self._prefix)
        count = GaugeMetricFamily(f"{self._prefix}_processes", "Processes of this frontend that answer.", len(answers))
        return generate_latest(MergedMetrics([*families, count]))

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        """See FrontendControl. Raises STALLED if no request was found and a process has not answered."""
        answers = await self._ask_all(lambda control: control.cancel(request_id, tenant))
        count = sum(answers.by_process.values())
        if not count:
            self._check_all_answered(answers, "the others have no such request")
        return count

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        """See FrontendControl. Processes that join later get the changes, too.

        Raises STALLED if a process has not answered.
        """
        async with self._setting:
            self._changes.setdefault(model, {}).update(changes)
            answers = await self._ask_all(lambda control: control.set_thresholds(model, changes))
            self._check_all_answered(answers, "the others have applied the change")

    def _check_all_answered(self, answers: _Answers[Any], others: str) -> None:
        if answers.silent:
            pids = ", ".join(str(process.pid) for process in answers.silent)
            raise Failure(
                Reason.STALLED,
                f"{len(answers.silent)} of {len(self._processes)} processes of this frontend did not answer within"
                f" {self._answer_s_max:g} s (pid {pids}); {others}: send the call again",
            )

    async def _ask_all(self, ask: Callable[[RemoteControl], Awaitable[T]]) -> _Answers[T]:
        """Ask every process. Drops exited processes; skips those that join during the call."""
        answers: dict[_Process, T] = {}
        silent: list[_Process] = []

        async def ask_one(process: _Process) -> None:
            try:
                answers[process] = await ask(process.control)
            except ProcessGone:
                self._drop(process)
            except Failure as failure:
                if failure.reason is not Reason.STALLED:
                    raise
                silent.append(process)
                log.warning("a process does not answer", name=process.name, pid=process.pid, why=failure.detail)

        async with asyncio.TaskGroup() as group:
            for process in self._processes:
                group.create_task(ask_one(process))
        running = {process: answer for process, answer in answers.items() if process in self._processes}
        return _Answers(running, silent)

    def _drop(self, process: _Process) -> None:
        """Remove an exited process and keep its counters. Idempotent."""
        if process in self._processes:
            self._processes.remove(process)
            self._exited = merged([self._exited, kept_after_exit(process.last, self._prefix)], self._prefix)
            process.control.path.unlink(missing_ok=True)
