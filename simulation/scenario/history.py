"""The faults that have struck in a run, and what they excuse: whom they may have kept away, and when."""

from collections.abc import Iterable
from dataclasses import dataclass

from services.worker.server import HANG_UP_S_MAX
from simulation.scenario.plan import FaultKind, Plan

SETTLE_S = 1.0
"""How long the plane has to come up before the first request."""
RESTART_S = 0.3
"""How soon a supervisor starts a process again that has ended."""
REJOIN_S = 6.0
"""How long a process needs at most to be used again: detection, restart, registration, reconnects and quarantine."""
HANG_UP_S = 7.0
"""How long a worker that leaves takes at most once its time to drain is over."""
CALM_S = 2.0
"""How long after a disturbance what was sent meanwhile has arrived, or its connection has ended."""
REGISTRY = "registry"


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault as it has struck: `Fault` in `plan.py`, with the time of the world."""

    at_s: float
    kind: FaultKind
    target: str
    other: str
    duration_s: float

    def concerns(self, name: str) -> bool:
        return name in (self.target, self.other)


class History:
    """Faults in the order in which they struck."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.struck: list[Struck] = []

    def _lasting_s(self, one: Struck) -> float:
        if one.kind in ("kill", "vanish_registry"):
            return RESTART_S
        if one.kind == "drain":
            return self._plan.drain_s + HANG_UP_S + RESTART_S
        return one.duration_s

    def _windows(self, name: str, kinds: tuple[FaultKind, ...]) -> Iterable[tuple[float, float]]:
        """When faults of these kinds may have kept the process away from others: from, until."""
        for one in self.struck:
            if one.kind in kinds and one.concerns(name) and not one.concerns(REGISTRY):
                yield one.at_s, self._until(one.at_s, one.at_s + self._lasting_s(one))

    def _until(self, since: float, until: float) -> float:
        """A process that needs the registry to come back waits for that as well."""
        until += REJOIN_S
        for one in self.struck:
            if one.concerns(REGISTRY) and one.at_s < until and one.at_s + self._lasting_s(one) + REJOIN_S > since:
                until = max(until, one.at_s + self._lasting_s(one) + REJOIN_S)
        return until

    def _away(self, worker: str) -> Iterable[tuple[float, float]]:
        return self._windows(worker, ("kill", "freeze", "drain", "partition", "one_way", "lie"))

    @property
    def _workers(self) -> list[str]:
        return [f"worker-{number}" for number in range(self._plan.workers)]

    @property
    def _frontends(self) -> list[str]:
        return [f"frontend-{number}" for number in range(self._plan.frontends)]

    # What is excused

    def may_lack_workers(self, since: float, until: float) -> bool:
        """Whether all workers that could run a request may have been away at one time in between."""
        windows = {worker: list(self._away(worker)) for worker in self._workers}
        begins = [begin for all_ in windows.values() for begin, _ in all_ if since <= begin <= until]
        if self._plan.odd_worker:  # Any two workers may have different cards.
            return any(begin <= until and since <= end for all_ in windows.values() for begin, end in all_)
        return any(
            all(any(begin <= now <= end for begin, end in of_one) for of_one in windows.values())
            for now in [since, *begins]
        )

    def may_lack_view(self, frontend: str, since: float) -> bool:
        """Whether a frontend may not know all workers, because the registry was out of reach as the plane came up."""
        elsewhere = [name for name in self._frontends if name != frontend]
        return any(
            one.at_s < SETTLE_S and since <= one.at_s + self._lasting_s(one) + REJOIN_S
            for one in self.struck
            if one.concerns(REGISTRY) and one.kind != "latency" and not any(map(one.concerns, elsewhere))
        )

    def loss_count(self, since: float, until: float) -> int:
        """How often a worker may have been lost."""
        return sum(begin <= until and since <= end for one in self._workers for begin, end in self._away(one))

    def kill_count(self, since: float, until: float) -> int:
        """How many workers have been killed or drained."""
        return sum(
            one.kind in ("kill", "drain") and one.target in self._workers and since - REJOIN_S <= one.at_s <= until
            for one in self.struck
        )

    def has_filled(self, until: float) -> bool:
        """Whether others may have filled a worker."""
        return any(one.kind == "fill" and one.at_s <= until for one in self.struck)

    def may_be_away(self, frontend: str, since: float, until: float) -> bool:
        """Whether a frontend may have been killed, drained or started again in between."""
        return any(begin <= until and since <= end for begin, end in self._windows(frontend, ("kill", "drain")))

    def has_ended(self, name: str) -> bool:
        """Whether a process was started again at some time."""
        return any(one.kind in ("kill", "drain") and one.target == name for one in self.struck)

    def has_drained(self, frontend: str, since: float, until: float) -> bool:
        return any(begin <= until and since <= end for begin, end in self._windows(frontend, ("drain",)))

    def may_break(self, frontend: str, worker: str, now: float) -> bool:
        """Whether the session between the two may break now: a fault concerns the worker, or the way between them.

        A worker that leaves waits until its frontends have hung up, unless one takes longer than it may.
        """
        return any(
            one.at_s + (HANG_UP_S_MAX if one.kind == "drain" and one.target == worker else 0.0)
            <= now
            <= self._until(one.at_s, one.at_s + self._lasting_s(one))
            for one in self.struck
            if (one.target == frontend and one.kind in ("kill", "drain"))
            or (one.concerns(worker) and (not one.other or one.concerns(frontend)) and one.kind not in ("jump", "fill"))
        )

    def is_calm(self, since: float, until: float, worker: str = "") -> bool:
        """Whether nothing was in the way to a worker in between, or to any of them. One that leaves is not away."""
        return not any(
            one.at_s <= until and one.at_s + one.duration_s + CALM_S >= since
            for one in self.struck
            if one.kind not in ("drain", "jump", "fill", "lie", "vanish_registry", "freeze_registry")
            and (not worker or one.concerns(worker) or one.target.startswith("frontend"))
        )
