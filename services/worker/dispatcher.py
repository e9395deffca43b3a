"""Exact admission: at most N requests run, at most Q wait, in the order they came; the rest is refused at once.

A group is the choices of one request: it is admitted as a whole or not at all, and then each of it is released alone.

| event | running < N | running = N, none waits | running = N, some wait | running = N, Q wait |
| --- | --- | --- | --- | --- |
| admit one | runs | waits | waits | refused |
| admit a group that fits | runs, and what is left waits | waits | waits | – |
| admit a group that does not | refused | refused | refused | refused |
| release of a running one | frees a slot | frees a slot | the first that waits runs | the first that waits runs |
| release of a waiting one | – | – | frees a place | frees a place |

With Q = 0 none waits and Q wait at once: the last column's refusals hold. Where prompt tokens are limited, too, whoever
would have to wait is refused as well when those that wait would then have more of them together.

Synchronous throughout: no await stands between a check and the change that rests on it, so the bounds hold at every
instant. A slot is given back on every way out, because its holder calls `release` in a `finally`.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid, wait_for_slot_s

MEAN_WEIGHT = 1 / 8
"""What the newest of the service times weighs in their mean: as with round-trip times in RFC 6298."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """slots: how many requests run (N ≥ 1). places: how many more may wait (Q ≥ 0), and tokens: how many prompt tokens
    they may have together; None: any. wait_s: how long one may wait.
    """

    slots: int
    places: int
    tokens: int | None = None
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        assert self.slots >= 1, "without a slot whoever waits would wait for ever"
        assert self.places >= 0
        assert self.tokens is None or self.tokens >= 0


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
        self._waiting: OrderedDict[Hashable, int] = OrderedDict()  # key → tokens, first come first.
        self._waiting_tokens = 0

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def is_running(self, key: Hashable) -> bool:
        """Whether it has a slot."""
        return key in self._running

    def admit(self, keys: Sequence[Hashable], tokens: int) -> None:
        """Give each of a group a slot or a place; tokens: the length of the prompt that they share.

        Raises WORKER_AT_CAPACITY when there is not room for all, INVALID_ARGUMENT when there never will be.
        """
        assert not any(key in self._running or key in self._waiting for key in keys), f"one of {keys} is in already"
        self._check_possible(len(keys), tokens)
        self._check_room(len(keys), tokens)
        for key in keys:
            if self._has_free_slot():
                self._run(key)
            else:
                self._waiting[key] = tokens
                self._waiting_tokens += tokens

    def release(self, key: Hashable, *, was_used: bool = True) -> None:
        """Take the request out, wherever it is. Idempotent. was_used: its slot, if it had one; then how long counts."""
        self._waiting_tokens -= self._waiting.pop(key, 0)
        if (since := self._running.pop(key, None)) is not None and was_used:
            self._learn(self._clock() - since)
        while self._waiting and self._has_free_slot():
            first, tokens = self._waiting.popitem(last=False)
            self._waiting_tokens -= tokens
            self._run(first)

    def refusal(self, cause: RefusedFor, detail: str) -> Failure:
        """WORKER_AT_CAPACITY, with the limits and the state that programs may want to know, numbers in decimal digits.

        `Retry-After` is `wait_for_slot_s`, once a request has held a slot.
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
            detail = f"n is {count}: {slots} run here at a time, and the prompts of the rest have more than the"
            raise invalid("n", f"{detail} {tokens_max} tokens that may wait")

    def _check_room(self, count: int, tokens: int) -> None:
        limits = self._limits
        left = max(0, count - (limits.slots - len(self._running)))  # Those for whom there is no slot.
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

    def _learn(self, held_s: float) -> None:
        before = held_s if self.service_time_s is None else self.service_time_s
        self.service_time_s = before + (held_s - before) * MEAN_WEIGHT
