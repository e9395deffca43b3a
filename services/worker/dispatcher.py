"""Exact admission: at most N requests run and at most Q wait, in order of arrival; further ones are refused at once.

A group is the choices of one request: it is admitted as a whole or not at all; each choice is released on its own.

| event | running < N | running = N, none waits | running = N, some wait | running = N, Q wait |
| --- | --- | --- | --- | --- |
| admit one | runs | waits | waits | refused |
| admit a group that fits | runs, and the rest waits | waits | waits | – |
| admit a group that does not fit | refused | refused | refused | refused |
| release a running one | frees a slot | frees a slot | the first waiting one runs | the first waiting one runs |
| release a waiting one | – | – | frees a place | frees a place |

With Q = 0, the second and the last column describe the same state, and the refusals of the last one apply. With a limit
on prompt tokens, a request that would have to wait is also refused if the waiting requests would then exceed the limit.

All methods are synchronous: no await separates a check from the change that depends on it, so the bounds hold at every
moment. A slot is always given back, because its holder calls `release` in a `finally`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid, wait_for_slot_s

MEAN_WEIGHT = 1 / 8
"""Weight of the newest service time in the mean; RFC 6298 uses the same for round-trip times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a dispatcher.

    `slots`: requests that may run (N ≥ 1). `places`: requests that may wait (Q ≥ 0). `tokens`: prompt tokens that
    waiting requests may have in all; None: no limit. `wait_s`: how long a request may wait.
    """

    slots: int
    places: int
    tokens: int | None = None
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        assert self.slots >= 1, "without a slot, requests would wait for ever"
        assert self.places >= 0
        assert self.tokens is None or self.tokens >= 0


class Dispatcher:
    """Starts each admitted request by calling `start(key)`, at once or when a slot becomes free.

    `start`: must not raise. `clock`: returns seconds. `service_time_s`: how long a request holds its slot, as an
    exponentially weighted mean; None: no request has given a slot back yet.
    """

    def __init__(self, limits: Limits, start: Callable[[Hashable], None], clock: Callable[[], float]) -> None:
        self.service_time_s: float | None = None
        self._limits = limits
        self._start = start
        self._clock = clock
        self._running: dict[Hashable, float] = {}  # key → time of its start
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()  # key → tokens, in order of arrival
        self._waiting_tokens = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def is_running(self, key: Hashable) -> bool:
        """Whether the request has a slot."""
        return key in self._running

    def admit(self, keys: Sequence[Hashable], tokens: int) -> None:
        """Give each request of a group a slot or a place. `tokens`: the length of their common prompt.

        Raises WORKER_AT_CAPACITY if there is no room for the whole group, INVALID_ARGUMENT if there never can be.
        """
        assert not any(key in self._running or key in self._waiting for key in keys), f"one of {keys} is admitted"
        self._check_possible(len(keys), tokens)
        self._check_room(len(keys), tokens)
        for key in keys:
            if self._has_free_slot():
                self._run(key)
            else:
                self._waiting[key] = tokens
                self._waiting_tokens += tokens

    def release(self, key: Hashable, *, was_used: bool = True) -> None:
        """Remove the request, whether it runs or waits. Idempotent.

        `was_used`: whether the request used its slot; if so, the time that it held the slot counts as a service time.
        """
        self._waiting_tokens -= self._waiting.pop(key, 0)
        if (since := self._running.pop(key, None)) is not None and was_used:
            self._record_service_time(self._clock() - since)
        while self._waiting and self._has_free_slot():
            first, tokens = self._waiting.popitem(last=False)
            self._waiting_tokens -= tokens
            self._run(first)

    def refusal(self, cause: RefusedFor, detail: str) -> Failure:
        """Build the failure WORKER_AT_CAPACITY, with the limits and the current state as metadata in decimal digits.

        `retry_after_s` is `wait_for_slot_s`, once a request has held a slot.
        """
        limits = self._limits
        state: dict[str, object] = {
            "engine_request_limit": limits.slots,
            "request_queue_limit": limits.places,
            "running": len(self._running),
            "waiting": len(self._waiting),
        }
        if limits.tokens is not None:
            state |= {"queue_token_limit": limits.tokens, "waiting_tokens": self._waiting_tokens}
        if cause is RefusedFor.QUEUE_TIMEOUT:
            state["queue_timeout_s"] = f"{limits.wait_s:g}"
        mean = self.service_time_s
        return Failure(
            Reason.WORKER_AT_CAPACITY,
            detail,
            retry_after_s=None if mean is None else wait_for_slot_s(len(self._waiting), mean, limits.slots),
            metadata={CAUSE: cause, **{name: str(value) for name, value in state.items()}},
        )

    def _check_possible(self, count: int, tokens: int) -> None:
        slots, places, tokens_max = self._limits.slots, self._limits.places, self._limits.tokens
        if count > slots + places:
            detail = f"n is {count}: this worker has room for {slots + places} answers at a time ({slots} run)"
            raise invalid("n", detail)
        if count > slots and tokens_max is not None and (count - slots) * tokens > tokens_max:
            detail = f"n is {count}: {slots} run here at a time, and the prompts of the others exceed the"
            raise invalid("n", f"{detail} {tokens_max} tokens that may wait")

    def _check_room(self, count: int, tokens: int) -> None:
        limits = self._limits
        left = max(0, count - (limits.slots - len(self._running)))  # Requests without a free slot.
        if left > limits.places - len(self._waiting):
            raise self.refusal(RefusedFor.CAPACITY, "Server overloaded: worker at capacity")
        if limits.tokens is not None and (would_wait := self._waiting_tokens + left * tokens) > limits.tokens:
            detail = f"too many prompt tokens would wait ({would_wait} of at most {limits.tokens})"
            raise self.refusal(RefusedFor.QUEUE_TOKENS, f"Server overloaded: worker at capacity, {detail}")

    def _has_free_slot(self) -> bool:
        return len(self._running) < self._limits.slots

    def _run(self, key: Hashable) -> None:
        self._running[key] = self._clock()
        self._start(key)

    def _record_service_time(self, held_s: float) -> None:
        before = held_s if self.service_time_s is None else self.service_time_s
        self.service_time_s = before + (held_s - before) * MEAN_WEIGHT
