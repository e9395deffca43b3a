"""Exact admission: at most N requests run and at most Q wait; further ones are refused at once.

Requests of one tenant start in order of arrival. Which tenant is next decides `fairness/fair_queue.py`; which waiting
request of another tenant gives way, instead of a newcomer that finds the queue full, `fairness/displacement.py`. With
one tenant none ever does.

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

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid, wait_for_slot_s
from services.core.tenant import EVERYBODY, Tenant
from services.worker.fairness.account import Account
from services.worker.fairness.accounts import Accounts
from services.worker.fairness.displacement import Holding, displaced_by
from services.worker.fairness.fair_queue import FairQueue

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


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The tokens that a tenant has had, and its waiting requests."""

    input_tokens: int
    output_tokens: int
    waiting_count: int


def _ignore(_: Hashable) -> None:
    """For a dispatcher with one tenant, whose requests never give way."""


class Dispatcher:
    """Starts each admitted request by calling `start(key)`, at once or when a slot becomes free.

    `start`, `on_displaced`: must not raise. `clock`: returns seconds. `on_displaced`: called with each waiting request
    that has given way to another, and is not admitted any more. `service_time_s`: how long a request holds its slot, as
    an exponentially weighted mean; None: no request has given a slot back yet.
    """

    def __init__(
        self,
        limits: Limits,
        start: Callable[[Hashable], None],
        clock: Callable[[], float],
        on_displaced: Callable[[Hashable], None] = _ignore,
    ) -> None:
        self.service_time_s: float | None = None
        self._limits = limits
        self._start = start
        self._clock = clock
        self._on_displaced = on_displaced
        self._running: dict[Hashable, tuple[float, Account]] = {}  # key → time of its start, and its tenant's account
        self._waiting = FairQueue()
        self._accounts = Accounts()

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        return len(self._waiting)

    def is_running(self, key: Hashable) -> bool:
        """Whether the request has a slot."""
        return key in self._running

    def is_waiting(self, key: Hashable) -> bool:
        """Whether the request has a place."""
        return key in self._waiting

    def account(self, key: Hashable) -> Account:
        """The account of a running request's tenant. Count there each token of its answer."""
        return self._running[key][1]

    def usage(self) -> Mapping[str, TenantUsage]:
        """What each tenant has had and has waiting, by its label in metrics."""
        waiting = Counter[str | None]()
        for account in self._waiting.accounts:
            waiting[account.label] += len(account.queue)
        totals = self._accounts.totals().items()
        return {label: TenantUsage(*tokens, waiting[label]) for label, tokens in totals}

    def admit(self, keys: Sequence[Hashable], tokens: int, tenant: Tenant = EVERYBODY) -> None:
        """Give each request of a group a slot or a place. `tokens`: the length of their common prompt.

        Raises WORKER_AT_CAPACITY if there is no room for the whole group, INVALID_ARGUMENT if there never can be.
        """
        assert not any(key in self._running or key in self._waiting for key in keys), f"one of {keys} is admitted"
        self._check_possible(len(keys), tokens)
        account = self._accounts.of(tenant)
        displaced = self._make_room(len(keys), tokens, account)
        if account.label is None:
            self._accounts.keep(account, self._busy_accounts())
        group = None
        for key in keys:
            if self._has_free_slot():
                self._waiting.pass_through(account)
                self._run(key, account, tokens)
            else:
                group = group or self._waiting.new_group(tokens)
                self._waiting.push(key, account, group)
        for key in displaced:
            self._on_displaced(key)

    def release(self, key: Hashable, *, was_used: bool = True) -> None:
        """Remove the request, whether it runs or waits. Idempotent.

        `was_used`: whether the request used its slot; if so, the time that it held the slot counts as a service time.
        """
        self._waiting.remove(key)
        if (ran := self._running.pop(key, None)) is not None and was_used:
            self._record_service_time(self._clock() - ran[0])
        while self._waiting and self._has_free_slot():
            first, account, group = self._waiting.pop()
            self._run(first, account, group.tokens)

    def refusal(self, cause: RefusedFor, detail: str, wait_s: float | None = None) -> Failure:
        """Build the failure WORKER_AT_CAPACITY, with the limits and the current state as metadata in decimal digits.

        `wait_s`: how long the request has waited, if that is why. `retry_after_s` is `wait_for_slot_s`, once a request
        has held a slot.
        """
        limits = self._limits
        state: dict[str, object] = {
            "engine_request_limit": limits.slots,
            "request_queue_limit": limits.places,
            "running": len(self._running),
            "waiting": len(self._waiting),
        }
        if limits.tokens is not None:
            state |= {"queue_token_limit": limits.tokens, "waiting_tokens": self._waiting.tokens}
        if wait_s is not None:
            state["queue_timeout_s"] = f"{wait_s:g}"
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

    def _make_room(self, count: int, tokens: int, account: Account) -> Iterable[Hashable]:
        """Remove the waiting requests that give way, and return their keys. Raises WORKER_AT_CAPACITY."""
        limits = self._limits
        left = count - (limits.slots - len(self._running))  # Requests without a free slot.
        if left <= 0:
            return ()
        would_wait = self._waiting.tokens + left * tokens
        missing_places = left - (limits.places - len(self._waiting))
        missing_tokens = 0 if limits.tokens is None else would_wait - limits.tokens
        if missing_places <= 0 and missing_tokens <= 0:
            return ()
        displaced = None
        if self._waiting.has_others(account):
            newcomer = Holding(account, left, tokens)
            displaced = displaced_by(newcomer, missing_places, missing_tokens, self._waiting.accounts)
        if displaced is None and missing_places > 0:
            raise self.refusal(RefusedFor.CAPACITY, "Server overloaded: worker at capacity")
        if displaced is None:
            detail = f"too many prompt tokens would wait ({would_wait} of at most {limits.tokens})"
            raise self.refusal(RefusedFor.QUEUE_TOKENS, f"Server overloaded: worker at capacity, {detail}")
        for key in displaced:
            self._waiting.remove(key)
        return displaced

    def _busy_accounts(self) -> set[Account]:
        return {*self._waiting.accounts, *(account for _, account in self._running.values())}

    def _has_free_slot(self) -> bool:
        return len(self._running) < self._limits.slots

    def _run(self, key: Hashable, account: Account, tokens: int) -> None:
        account.input_tokens += tokens
        self._running[key] = self._clock(), account
        self._start(key)

    def _record_service_time(self, held_s: float) -> None:
        before = held_s if self.service_time_s is None else self.service_time_s
        self.service_time_s = before + (held_s - before) * MEAN_WEIGHT
