"""All processes of a frontend, as their supervisor asks them: what it answers is the answer of all."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from services.core.errors import Failure, Reason
from services.frontend.control import Changes
from services.frontend.processes.ipc import PROCESS_ANSWER_S_MAX, Gone, Remote, Welcome
from services.frontend.processes.metrics_merge import MergedMetrics, Reading, merged, outliving, parsed

log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class _Answers(Generic[T]):
    """Of those that live: what they answered, and who did not in time."""

    by_process: dict["_Process", T]
    silent: Sequence["_Process"]


@dataclass(eq=False)
class _Process:
    """One that lives, as far as is known. last: what it exposed when it was last asked."""

    name: str
    pid: int
    remote: Remote
    last: Reading = field(default_factory=list)


class ProcessGroup:
    """A Whole. A process that has died is forgotten when it does not answer, but for what it had counted."""

    def __init__(self, metrics_prefix: str, answer_s_max: float = PROCESS_ANSWER_S_MAX) -> None:
        """answer_s_max: how long a process is waited for."""
        self._answer_s_max = answer_s_max
        self._prefix = metrics_prefix
        self._processes: list[_Process] = []
        self._names: set[str] = set()  # Of all that ever joined.
        self._past: Reading = []
        self._changes: dict[str, dict[str, object]] = {}  # Of thresholds, by model: few, since a worker served each.
        self._scraping = asyncio.Lock()  # An older reading must not take the place of a newer one.
        self._setting = asyncio.Lock()  # All processes get the same changes in the same order.

    def join(self, name: str, path: Path, pid: int) -> Welcome:
        """Ask the process at `path` from now on. Whoever had its name is dead: the next question will show it."""
        welcome = Welcome(dict(self._changes), is_successor=name in self._names)
        self._names.add(name)
        self._processes.append(_Process(name, pid, Remote(path, self._answer_s_max)))
        return welcome

    async def exposition(self) -> bytes:
        """What all have counted, the dead included; gauges of those that answer."""
        async with self._scraping:
            answers = (await self._ask_all(Remote.exposition)).by_process
            for process, exposition in answers.items():
                process.last = parsed(exposition)
            silent = [process for process in self._processes if process not in answers]
            readings = [*(one.last for one in answers), *(outliving(one.last, self._prefix) for one in silent)]
            reading = merged([self._past, *readings], self._prefix)
        count = GaugeMetricFamily(f"{self._prefix}_processes", "Processes of this frontend that answer.", len(answers))
        return generate_latest(MergedMetrics([*reading, count]))

    async def cancel(self, request_id: str) -> int:
        """See Whole. Raises STALLED where nothing was found and a process has not said."""
        answers = await self._ask_all(lambda remote: remote.cancel(request_id))
        count = sum(answers.by_process.values())
        if not count:
            self._check_all_answered(answers, "the others have no such request")
        return count

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        """See Whole; also in processes that join later. Raises STALLED where one has not said."""
        async with self._setting:
            self._changes.setdefault(model, {}).update(changes)
            answers = await self._ask_all(lambda remote: remote.set_thresholds(model, changes))
            self._check_all_answered(answers, "the others have done it")

    def _check_all_answered(self, answers: _Answers[Any], others: str) -> None:
        if answers.silent:
            pids = ", ".join(str(process.pid) for process in answers.silent)
            raise Failure(
                Reason.STALLED,
                f"{len(answers.silent)} of {len(self._processes)} processes of this frontend did not answer within"
                f" {self._answer_s_max:g} s (pid {pids}), {others}: ask again",
            )

    async def _ask_all(self, ask: Callable[[Remote], Awaitable[T]]) -> _Answers[T]:
        """Who is gone is buried; who joins meanwhile is not asked."""
        answers: dict[_Process, T] = {}
        silent: list[_Process] = []

        async def ask_one(process: _Process) -> None:
            try:
                answers[process] = await ask(process.remote)
            except Gone:
                self._bury(process)
            except Failure as failure:
                if failure.reason is not Reason.STALLED:
                    raise
                silent.append(process)
                log.warning("a process does not answer", name=process.name, pid=process.pid, why=failure.detail)

        async with asyncio.TaskGroup() as group:
            for process in self._processes:
                group.create_task(ask_one(process))
        living = {process: answer for process, answer in answers.items() if process in self._processes}
        return _Answers(living, silent)

    def _bury(self, process: _Process) -> None:
        """Keep what it had counted. Idempotent."""
        if process in self._processes:
            self._processes.remove(process)
            self._past = merged([self._past, outliving(process.last, self._prefix)], self._prefix)
            process.remote.path.unlink(missing_ok=True)
