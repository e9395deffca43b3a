"""What each tenant may still send to this frontend process.

Every frontend process keeps its own share: a limit divided by the number of processes that are alive, as workers count
them by their sessions. So frontends agree without a word between them, and what is let through differs from a limit by
no more than one share, from when a frontend comes or goes until the next heartbeat of the workers.

| bound | what counts | refused while |
| --- | --- | --- |
| `requests_at_once` | requests under way here | as many as the share, rounded up, are under way |
| `requests_per_minute` | requests | the bucket has less than one |
| `tokens_per_minute` | prompts when they are admitted, answers as they are delivered | the bucket has less than one |
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NoReturn

from services.core.errors import CAUSE, RETRY_AFTER_S_MIN, Failure, Reason
from services.core.tenant import RATES, Allowance, Tenant, TenantLabels
from services.frontend.limits.bucket import LEAST, Bucket
from services.runtime.loop import clock

STATES_KEPT = 4096
"""How many tenants a frontend process remembers, or twice as many as have used a part of their limits, if that is more.
"""
AT_ONCE, PER_MINUTE = "requests_at_once", "_per_minute"


class _State:
    """What a tenant has used here."""

    __slots__ = ("requests", "running", "tokens")

    def __init__(self) -> None:
        self.running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None

    def look(self, tenant: Tenant, share: float, now: float) -> None:
        """Make the buckets of the limits that the tenant has now."""
        self.requests = _bucket(self.requests, tenant.requests_per_minute, share, now)
        self.tokens = _bucket(self.tokens, tenant.tokens_per_minute, share, now)

    def rates(self, tenant: Tenant) -> Iterator[tuple[str, float, Bucket]]:
        """Each rate that the tenant has: its name, how much comes in a minute, and its bucket here."""
        limits = (tenant.requests_per_minute, tenant.tokens_per_minute)
        for name, limit, bucket in zip(RATES, limits, (self.requests, self.tokens), strict=True):
            if limit is not None and bucket is not None:
                yield name, limit, bucket

    def is_unused(self, now: float) -> bool:
        """Whether a new one would be the same."""
        return not self.running and all(one is None or one.is_full(now) for one in (self.requests, self.tokens))


def _bucket(bucket: Bucket | None, limit: float | None, share: float, now: float) -> Bucket | None:
    if limit is None:
        return None
    return bucket or Bucket(limit * share, now)


class Grant:
    """One request that was let in. `settle` it when its prompt is known, `use` tokens as they are delivered."""

    __slots__ = ("_state", "is_settled", "reserved", "takes_request")

    def __init__(self, state: _State, reserved: int, *, takes_request: bool) -> None:
        """`reserved`: tokens that its prompt is believed to have."""
        self._state = state
        self.reserved = reserved
        self.is_settled = False
        self.takes_request = takes_request

    def settle(self, prompt_tokens: int) -> None:
        """The prompt has this many tokens: correct what was reserved for it."""
        self.is_settled = True
        self.use(prompt_tokens - self.reserved)
        self.reserved = prompt_tokens

    def use(self, tokens: int) -> None:
        """Charge tokens of the answer."""
        if self._state.tokens is not None:
            self._state.tokens.take(tokens)

    def give_back(self) -> None:
        """The request was not served, through no fault of its own: it counts for nothing."""
        self.settle(0)
        if self.takes_request and self._state.requests is not None:
            self._state.requests.take(-1)
        self.takes_request = False

    def leave(self) -> None:
        """The request is over. Call it once."""
        self._state.running -= 1


class TenantLimits:
    """The limits of all tenants at this process. `refusals`: by the label of the tenant and the bound."""

    def __init__(self, frontend_count: Callable[[], int], rng: Random, now: Callable[[], float] = clock) -> None:
        """`frontend_count`: how many frontend processes are alive, this one included."""
        self._frontend_count = frontend_count
        self._rng = rng
        self._now = now
        self._states: dict[str, _State] = {}
        self._forget_at = STATES_KEPT
        self._labels = TenantLabels()
        self.refusals: Counter[tuple[str, str]] = Counter()

    def admit(self, tenant: Tenant, tokens: int) -> Grant:
        """Let a request in, whose prompt is believed to have `tokens`. Raises RATE_LIMITED, and takes nothing then."""
        share, now = 1 / self._frontend_count(), self._now()
        state = self._state(tenant, share, now)
        limit = tenant.requests_at_once
        if limit is not None and state.running >= math.ceil(limit * share):
            self._refuse(tenant, AT_ONCE, limit, state.running, RETRY_AFTER_S_MIN, share)
        for name, rate, bucket in state.rates(tenant):
            if (left := bucket.left(rate * share, now)) < LEAST:
                wait_s = bucket.promise_s(rate * share, now, self._rng)
                self._refuse(tenant, f"{name}{PER_MINUTE}", rate, rate * share - left, wait_s, share)
        if state.requests is not None:
            state.requests.take(1)
        return self._granted(state, tokens, takes_request=True)

    def resume(self, tenant: Tenant) -> Grant:
        """Let a request in whose answer was admitted before: it counts, but is not refused."""
        return self._granted(self._state(tenant, 1 / self._frontend_count(), self._now()), 0, takes_request=False)

    def _granted(self, state: _State, tokens: int, *, takes_request: bool) -> Grant:
        grant = Grant(state, tokens, takes_request=takes_request)
        grant.use(tokens)
        state.running += 1
        return grant

    def allowances(self, tenant: Tenant) -> Sequence[Allowance]:
        """What the tenant has left of its rates, as clients are told: of the whole limit, as far as is known here."""
        count, now = self._frontend_count(), self._now()
        state = self._state(tenant, 1 / count, now)
        return [
            Allowance(
                name,
                rate,
                max(0, math.floor(bucket.left(rate / count, now) * count)),
                bucket.reset_s(rate / count, now),
            )
            for name, rate, bucket in state.rates(tenant)
        ]

    def _state(self, tenant: Tenant, share: float, now: float) -> _State:
        state = self._states.get(tenant.name)
        if state is None:
            if len(self._states) >= self._forget_at:
                self._forget(now)
            state = self._states[tenant.name] = _State()
        state.look(tenant, share, now)
        return state

    def _forget(self, now: float) -> None:
        self._states = {name: state for name, state in self._states.items() if not state.is_unused(now)}
        self._forget_at = max(STATES_KEPT, 2 * len(self._states))

    def _refuse(self, tenant: Tenant, bound: str, limit: float, used: float, wait_s: float, share: float) -> NoReturn:
        self.refusals[self._labels.of(tenant.name), bound] += 1
        count = round(1 / share)
        detail = f"the tenant {tenant.name} has used up {bound}: its limit is {limit:g}"
        if count > 1:
            detail += f", shared by {count} frontend processes"
        raise Failure(
            Reason.RATE_LIMITED,
            f"{detail}; come again in {wait_s:.3g} s",
            retry_after_s=wait_s,
            metadata={CAUSE: bound, "limit": f"{limit:g}", "value": f"{used / share:g}"},
        )
