"""Admission to a process: whether it takes new requests, and which requests it has."""

import asyncio
from itertools import chain

from services.core.call import Call, Cause, Ending
from services.core.errors import RETRY_AFTER_S_MIN, Failure, Reason
from services.core.tenant import Tenant
from services.runtime.tasks import wait_event

_Name = tuple[str, str]
"""A tenant's name and a request id: two tenants may use the same id, and neither knows the other's."""


def draining() -> Failure:
    """The failure of a request that comes, or has not begun, while the server shuts down."""
    detail = "the server is shutting down and takes no new requests"
    return Failure(Reason.DRAINING, detail, retry_after_s=RETRY_AFTER_S_MIN)


class Gate:
    """The requests of a process. `is_draining`: it takes no new ones."""

    def __init__(self) -> None:
        self.is_draining = False
        self._inside: dict[_Name, Ending] = {}  # The ending of the first request with this name.
        self._namesakes: dict[_Name, dict[Ending, None]] = {}  # Endings of further requests with that name; rare.
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def count(self) -> int:
        """How many requests the process has."""
        return len(self._inside) + sum(map(len, self._namesakes.values()))

    def enter(self, call: Call) -> None:
        """Register a request. Raises DRAINING."""
        if self.is_draining:
            raise draining()
        name = (call.tenant.name, call.request_id)
        if self._inside.setdefault(name, call.ending) is not call.ending:
            self._namesakes.setdefault(name, {})[call.ending] = None
        self._quiet.clear()

    def leave(self, call: Call) -> None:
        """Remove a request that has ended."""
        name = (call.tenant.name, call.request_id)
        namesakes = self._namesakes.get(name)
        if namesakes is None:
            del self._inside[name]
        elif self._inside[name] is call.ending:
            self._inside[name] = namesakes.popitem()[0]
        else:
            namesakes.pop(call.ending, None)
        if namesakes is not None and not namesakes:
            del self._namesakes[name]
        if not self._inside:
            self._quiet.set()

    def cancel(self, request_id: str, tenant: Tenant) -> int:
        """Cancel every request of a tenant with this id that has not ended yet. Returns how many. Idempotent."""
        name = (tenant.name, request_id)
        first = self._inside.get(name)
        named = () if first is None else (first, *self._namesakes.get(name, ()))
        endings = [ending for ending in named if ending.failure is None]
        for ending in endings:
            ending.fail(Failure(Reason.CANCELLED, "the request was cancelled by its id"), Cause.EXPLICIT)
        return len(endings)

    def fail_all(self, failure: Failure) -> None:
        """Fail every request. `wait_quiet` waits until they have ended."""
        for ending in [*self._inside.values(), *chain.from_iterable(self._namesakes.values())]:
            ending.fail(failure, Cause.DRAIN)

    async def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no request is left. Returns False if some are left after `timeout_s`."""
        return await wait_event(self._quiet, timeout_s)
