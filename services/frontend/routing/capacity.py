"""Whether one worker has room for a request, as far as this frontend knows.

| a worker is full for | until |
| --- | --- |
| more choices than its limit allows beside our requests, unless another tenant has more of these | one of these ends |
| as many choices as it refused for capacity, or more | its refusals are forgotten |
| as many prompt tokens as it refused to queue, or more | its refusals are forgotten |

Refusals count for the tenant whose request was refused. They are forgotten when the worker reports its load, when a
request of ours that had a slot or a place ends, and `full_s` after the last one at the latest.

Requests of other tenants do not keep a tenant away that has less than one of them: the worker lets one of these give
way (`services/worker/fairness/displacement.py`), or refuses. What a tenant has is counted as there, but with the
requests that run.

To add another reason, extend `Capacity.is_full` and the methods for the events that begin and end it.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.core.errors import Reason, RefusedFor
from services.core.tenant import EVERYBODY, Tenant
from services.stubs import worker_pb2

FULL_S = 1.0
"""How long a refusal for capacity counts at most."""


@dataclass(slots=True)
class _Share:
    """The requests of one tenant on a worker."""

    count: int
    weight: float


@dataclass(slots=True)
class _Refusals:
    """What a worker refused to one tenant: a number of choices, and of prompt tokens."""

    choices: "Refusal"
    tokens: "Refusal"

    def forget(self) -> None:
        self.choices.forget()
        self.tokens.forget()


class Capacity:
    """Counts our requests on one worker and remembers what the worker refused."""

    def __init__(self, full_s: float, on_room: Callable[[], None]) -> None:
        """`full_s`: how long a refusal counts at most; infinity: until another event ends it.

        `on_room`: called when a refusal has expired, so that the worker may have room.
        """
        self.in_flight_count = 0
        self.request_limit: int | None = None
        """How many requests the worker takes, running and waiting; None if the worker names no limit."""
        self._full_s = full_s
        self._on_room = on_room
        self._shares: dict[str, _Share] = {}  # By the names of tenants, as the refusals.
        self._refusals: dict[str, _Refusals] = {}

    def is_full(self, count: int = 1, tokens: int = 0, tenant: Tenant = EVERYBODY) -> bool:
        """Whether there is no room for `count` more requests of the tenant.

        `tokens`: how many prompt tokens would wait with them; 0 ignores refusals for tokens.
        """
        refused = self._refusals.get(tenant.name)
        if refused is not None and (refused.choices.covers(count) or refused.tokens.covers(tokens)):
            return True
        return self._is_at_limit(count) and not self._has_another_more(tenant, count)

    @property
    def is_closed(self) -> bool:
        """Whether no request of any tenant could have room."""
        return self.is_full() and self._shares.keys() <= {EVERYBODY.name}

    def _is_at_limit(self, count: int) -> bool:
        return self.request_limit is not None and self.in_flight_count + count > self.request_limit

    def _has_another_more(self, tenant: Tenant, count: int) -> bool:
        """Whether another tenant has more requests, by weight, than this one would have with `count` more."""
        own = self._shares.get(tenant.name)
        held = (count - 1 + (0 if own is None else own.count)) / tenant.weight
        return any((one.count - 1) / one.weight > held for one in self._shares.values() if one is not own)

    def on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """The worker has named its limits."""
        slots = welcome.engine_request_limit
        self.request_limit = slots + welcome.request_queue_limit if slots else None

    def on_refused(self, bound: RefusedFor, count: int, tokens: int, tenant: Tenant = EVERYBODY) -> None:
        """The worker refused `count` choices, which have `tokens` prompt tokens together, because of `bound`.

        A request that waited too long leaves its place to another one, so its refusal does not make the worker full.
        """
        if bound is RefusedFor.QUEUE_TIMEOUT:
            return
        refused = self._refusals.get(tenant.name)
        if refused is None:
            new = Refusal(self._full_s, self._on_room), Refusal(self._full_s, self._on_room)
            refused = self._refusals[tenant.name] = _Refusals(*new)
        if bound is RefusedFor.QUEUE_TOKENS:
            refused.tokens.remember(tokens)
        else:
            refused.choices.remember(count)

    def on_opened(self, count: int, tenant: Tenant = EVERYBODY) -> None:
        """`count` requests were sent to the worker."""
        self.in_flight_count += count
        share = self._shares.get(tenant.name)
        if share is None:
            self._shares[tenant.name] = _Share(count, tenant.weight)
        else:
            share.count, share.weight = share.count + count, tenant.weight

    def on_closed(self, *, frees_room: bool, tenant: Tenant = EVERYBODY) -> bool:
        """One request has ended. `frees_room`: it had a slot or a place, which another request can have now.

        Returns whether the worker may have room that it did not have before.
        """
        was_full = self._is_at_limit(1)
        self.in_flight_count -= 1
        share = self._shares[tenant.name]
        share.count -= 1
        if not share.count:
            del self._shares[tenant.name]
        was_refusing = frees_room and self._forget_refusals()
        return (was_full or was_refusing) and not self.is_full()

    def on_load(self, load: worker_pb2.Load) -> bool:
        """The worker has sent a load. Returns whether the worker may have room that it did not have before.

        A load without ranks is only a heartbeat, and does not end refusals.
        """
        return bool(load.ranks) and self._forget_refusals()

    def on_lost(self) -> None:
        """The session is over, and with it all its requests."""
        self.in_flight_count = 0
        self._shares.clear()
        self._forget_refusals()

    def _forget_refusals(self) -> bool:
        """Forget what the worker refused. Returns whether there was anything to forget."""
        was_set = any(one.choices.is_set or one.tokens.is_set for one in self._refusals.values())
        for one in self._refusals.values():
            one.forget()
        self._refusals.clear()
        return was_set


class Refusal:
    """The smallest number of choices, or of prompt tokens, that a worker refused. It may have room for fewer.

    The refusal is forgotten after `full_s` in any case.
    """

    def __init__(self, full_s: float, on_expired: Callable[[], None]) -> None:
        self._full_s = full_s
        self._on_expired = on_expired
        self._amount: int | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        return self._amount is not None

    def covers(self, amount: int) -> bool:
        """Whether the worker refused this amount or a smaller one."""
        return self._amount is not None and amount >= self._amount

    def remember(self, amount: int) -> None:
        """Remember the refusal for `full_s` from now on. A smaller amount that was refused before still counts."""
        amount = amount if self._amount is None else min(amount, self._amount)
        self.forget()
        self._amount = amount
        if math.isfinite(self._full_s):
            self._expiry = asyncio.get_running_loop().call_later(self._full_s, self._expire)

    def forget(self) -> None:
        self._amount = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        self.forget()
        self._on_expired()


def had_place(reason: str, cause: str | None) -> bool:
    """Whether a request that failed with `reason` had a slot or a place on its worker, which another can have now.

    A request that was refused at once had none; one that waited too long had a place. One that gave way had a place,
    but another tenant's request has it already. `cause`: from the failure's metadata.
    """
    return reason != Reason.WORKER_AT_CAPACITY or cause == RefusedFor.QUEUE_TIMEOUT
