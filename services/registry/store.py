"""What a store is: it keeps records that hang on leases, and a view of all of them."""

from dataclasses import dataclass
from typing import Protocol

from services.core.errors import Failure, Reason, quoted
from services.registry.watch_cache import Entry, WatchCache
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING, Instance


class LeaseLost(Exception):
    """The lease is not there any more, and so neither is its record. To be granted and put anew."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What a record hangs on. It lapses `granted_s` seconds after the last `keep_alive`; its record goes with it."""

    lease_id: int
    granted_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it was stored. The view shows it once it has come to `revision`."""

    instance: Instance
    revision: int


class Store(Protocol):
    """Keeps records. A method that needs the store while it is away raises Failure(STORE_AWAY), in bounded time."""

    @property
    def view(self) -> WatchCache:
        """The instances as last known. Stays as it is while the store is away."""
        ...

    async def run(self) -> None:
        """Keep the view until cancelled."""
        ...

    async def grant(self, lease_s: int) -> Lease:
        """A new lease. A store may grant more than was asked."""
        ...

    async def keep_alive(self, lease: Lease) -> None:
        """Begin the lease's time again. Raises LeaseLost."""
        ...

    async def put(self, instance: Instance, lease: Lease, *, takes_over: bool) -> Stored:
        """Store the record on the lease. See `merged` for what is stored, and what is refused.

        Raises LeaseLost, Failure(TAKEN_OVER).
        """
        ...

    async def revoke(self, lease: Lease) -> None:
        """End the lease and remove its record at once. A record that went over to another lease stays. Idempotent."""
        ...

    async def drain(self, instance_id: str) -> Instance:
        """Mark the record as draining, on the lease that it has. Raises Failure(INSTANCE_NOT_FOUND)."""
        ...


def merged(old: Entry | None, instance: Instance, lease: Lease, *, takes_over: bool) -> Instance:
    """What to store when `instance` is put over `old`: draining is never undone.

    Raises Failure(TAKEN_OVER) when the record hangs on another lease and `takes_over` is not given: a registration that
    comes back late must not push out the one that followed it.
    """
    if old is None:
        return instance
    if old.lease_id != lease.lease_id and not takes_over:
        raise Failure(Reason.TAKEN_OVER, f"a newer stream registered {instance.instance_id}")
    return drained(instance) if old.instance.state == INSTANCE_STATE_DRAINING else instance


def drained(instance: Instance) -> Instance:
    """The same record, marked."""
    marked = Instance()
    marked.CopyFrom(instance)
    marked.state = INSTANCE_STATE_DRAINING
    return marked


def not_found(instance_id: str) -> Failure:
    return Failure(Reason.INSTANCE_NOT_FOUND, f"no instance {quoted(instance_id)} is registered", param="instance_id")
