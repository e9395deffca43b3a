"""Moments at which faults strike: just after one event of the plane has begun, and the next one is under way.

Each is a call of one function in a frontend, and concerns one worker. Which one that is may be known only when the
fault strikes, a little later.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from simulation.runtime.world import Process, World
from simulation.scenario.plan import ELSEWHERE, HERE, THERE, Fault
from simulation.scenario.watching import Watched, watch

_MIGRATION = "services.frontend.migration.migration:Migration"
_TABLE = "services.frontend.session.stream_table:StreamTable"


@dataclass(frozen=True)
class Moment:
    """`session`: the session with the worker that it concerns, from the arguments of the call, or None.

    `when`: whether a call counts, from its outcome.
    """

    place: str
    session: Callable[..., Any]
    when: Callable[[Any], bool] = lambda outcome: not isinstance(outcome, BaseException)


def _current(migration: Any, *_: Any) -> Any:
    return getattr(getattr(migration, "_current", None), "session", None)


def _second(migration: Any, *_: Any) -> Any:
    return getattr(getattr(migration, "_second", None), "session", None)


def _of_table(table: Any, *_: Any) -> Any:
    return table._candidate.session


MOMENTS = {
    "a request is sent to a worker": Moment(f"{_TABLE}._start", _of_table),
    "an engine has begun": Moment(
        "services.frontend.migration.attempt:MigrationAttempt.on_begun", lambda attempt: attempt.session
    ),
    "tokens come": Moment(f"{_MIGRATION}.on_tokens", lambda migration, attempt, delta: attempt.session),
    "a stream moves": Moment(f"{_MIGRATION}._begin_move", _current),
    "a second attempt begins": Moment(f"{_MIGRATION}._start_second", _current),
    "a second attempt has a worker": Moment(f"{_MIGRATION}._start_second", _second),
    "a second attempt takes over": Moment(f"{_MIGRATION}._try_take_over", _current, lambda outcome: outcome is True),
    "a worker says that it leaves": Moment(f"{_TABLE}.on_goaway", _of_table),
    "a stream waits for a worker": Moment("services.frontend.routing.wait_queue:WaitQueue.join", lambda *_: None),
    "a worker refuses": Moment(
        "services.frontend.layers.route:Route._on_failure", lambda route, worker, *_: worker.session
    ),
    "a stream ends": Moment(f"{_TABLE}.on_end", _of_table),
    "a stream is let go of": Moment(f"{_TABLE}.let_go", _of_table),
    "an answer is looked for": Moment("services.frontend.resume.finder:GenerationFinder._resumed", lambda *_: None),
    "an answer is adopted": Moment(f"{_TABLE}.adopt", _of_table),
    "a session is lost": Moment(f"{_TABLE}.fail_all", _of_table),
    "a worker is found": Moment("services.frontend.session.pool:Pool.offer", lambda pool, session: session),
}
FAULT_MOMENT = "a fault strikes"
"""The moment of faults that follow others. It concerns no process: the fault names its own."""


class Moments:
    """Strikes faults at their moments."""

    def __init__(self, world: World, faults: Iterable[Fault], strike: Callable[[Fault, str, str], None]) -> None:
        """`strike`: called with a fault and with the names of its target and of the other end."""
        self._world = world
        self._strike = strike
        self._counts = Counter[str]()
        self._waiting: dict[str, list[Fault]] = {}
        for fault in faults:
            if fault.moment:
                self._waiting.setdefault(fault.moment, []).append(fault)
        watch([self._watched(name) for name in self._waiting if name != FAULT_MOMENT], lambda name: None)

    def on_fault(self) -> None:
        """A fault has struck."""
        self._on_moment(FAULT_MOMENT, None, lambda: None)

    def _watched(self, name: str) -> Watched:
        moment = MOMENTS[name]

        def note(outcome: Any, *arguments: Any) -> bool:
            if self._waiting.get(name) and moment.when(outcome):
                self._on_moment(name, self._world.current, lambda: moment.session(*arguments))
            return False

        return Watched(name, moment.place, note)

    def _on_moment(self, name: str, here: Process | None, session: Callable[[], Any]) -> None:
        self._counts[name] += 1
        due = [fault for fault in self._waiting.get(name, ()) if fault.nth == self._counts[name]]
        for fault in due:
            self._waiting[name].remove(fault)
            self._world.after(fault.at_s, lambda fault=fault: self._resolve(fault, here, session))  # type: ignore[misc]

    def _resolve(self, fault: Fault, here: Process | None, session: Callable[[], Any]) -> None:
        names = {"": ""}
        if here is not None:
            there = self._worker_of(session())
            others = [name for name in self._workers() if name != there]
            names |= {HERE: here.name, THERE: there or others[0], ELSEWHERE: others[0] if others else there}
        self._strike(fault, names.get(fault.target, fault.target), names.get(fault.other, fault.other))

    def _workers(self) -> list[str]:
        return [name for name in self._world.processes if name.startswith("worker")]

    def _worker_of(self, session: Any) -> str:
        """The process at the other end of a session; empty if it is not there any more."""
        for name in self._workers():
            owner = self._world.processes[name].owner
            if session is not None and owner is not None and owner._instance_id == session.record.instance_id:
                return name
        return ""
