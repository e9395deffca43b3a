"""Exact admission: at most N requests run, at most Q wait, in the order they came; the rest is refused at once.

| event | running < N | running = N, none waits | running = N, some wait | running = N, Q wait |
| --- | --- | --- | --- | --- |
| admit | runs | waits | waits | refused |
| release of a running one | frees a slot | frees a slot | the first that waits runs | the first that waits runs |
| release of a waiting one | – | – | frees a place | frees a place |

With Q = 0 none waits and Q wait at once: the last column's refusal holds.

Synchronous throughout: no await stands between a check and the change that rests on it, so the bounds hold at every
instant. A slot is given back on every way out, because its holder calls `release` in a `finally`.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from services.errors import Failure, Reason

MEAN_WEIGHT = 1 / 8
"""What the newest of the service times weighs in their mean: as with round-trip times in RFC 6298."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """slots: how many requests run (N ≥ 1). places: how many more may wait (Q ≥ 0)."""

    slots: int
    places: int

    def __post_init__(self) -> None:
        assert self.slots >= 1, "without a slot whoever waits would wait for ever"
        assert self.places >= 0


class Dispatcher:
    """Starts requests by calling `start(key)` at once or when a slot comes free. `start` must not raise.

    clock: in seconds. service_time_s: how long a request holds its slot, an exponentially weighted mean; None: none has
    given its slot back so far.
    """

    def __init__(self, limits: Limits, start: Callable[[Hashable], None], clock: Callable[[], float]) -> None:
        self.service_time_s: float | None = None
        self._limits = limits
        self._start = start
        self._clock = clock
        self._running: dict[Hashable, float] = {}  # key → since when
        self._waiting: dict[Hashable, None] = {}  # A dict is the queue that also forgets one in the middle at once.

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def admit(self, key: Hashable) -> None:
        """Give the request a slot or a place. Raises WORKER_AT_CAPACITY when there is neither."""
        assert key not in self._running, f"{key} runs already"
        assert key not in self._waiting, f"{key} waits already"
        if self._has_free_slot():
            self._run(key)
        elif len(self._waiting) < self._limits.places:
            self._waiting[key] = None
        else:
            raise Failure(Reason.WORKER_AT_CAPACITY, "Server overloaded: worker at capacity")

    def release(self, key: Hashable) -> None:
        """Take the request out, wherever it is. Idempotent."""
        self._waiting.pop(key, None)
        if (since := self._running.pop(key, None)) is not None:
            self._learn(self._clock() - since)
        while self._waiting and self._has_free_slot():
            first = next(iter(self._waiting))
            del self._waiting[first]
            self._run(first)

    def _has_free_slot(self) -> bool:
        return len(self._running) < self._limits.slots

    def _run(self, key: Hashable) -> None:
        self._running[key] = self._clock()
        self._start(key)

    def _learn(self, held_s: float) -> None:
        before = held_s if self.service_time_s is None else self.service_time_s
        self.service_time_s = before + (held_s - before) * MEAN_WEIGHT
