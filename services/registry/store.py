"""The interface of a store, which keeps instance records on leases, and the rules that all stores share."""

from dataclasses import dataclass
from typing import Protocol

from services.core.errors import Failure, Reason, quoted
from services.registry.watch_cache import Entry, WatchCache
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING, Instance


class LeaseLost(Exception):
    """The lease has expired, and its record is gone. The caller must get a new lease and put the record again."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease. It expires `granted_s` seconds after the last `keep_alive`, and its record is then removed."""

    lease_id: int
    granted_s: float


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it was stored. The cache contains it once the cache has reached `revision`."""

    instance: Instance
    revision: int


class Store(Protocol):
    """Keeps instance records. While the storage is unavailable, methods raise Failure(STORE_AWAY) in bounded time."""

    @property
    def cache(self) -> WatchCache:
        """The instances as last known. Unchanged while the storage is unavailable."""
        ...

    async def run(self) -> None:
        """Keep the cache up to date until cancelled."""
        ...

    async def grant(self, lease_s: int) -> Lease:
        """Create a lease. Its time may be longer than `lease_s`."""
        ...

    async def keep_alive(self, lease: Lease) -> None:
        """Renew the lease for its full time. Raises LeaseLost."""
        ...

    async def put(self, instance: Instance, lease: Lease, *, takes_over: bool) -> Stored:
        """Store the record on the lease. See `merged` for what is stored and what is refused.

        Raises LeaseLost, Failure(TAKEN_OVER).
        """
        ...

    async def revoke(self, lease: Lease) -> None:
        """Revoke the lease and remove its record. A record that is now on another lease stays. Idempotent."""
        ...

    async def drain(self, instance_id: str) -> Instance:
        """Mark the record as draining; it stays on its lease. Raises Failure(INSTANCE_NOT_FOUND)."""
        ...


def taken_over(instance_id: str) -> Failure:
    """The failure of a registration that is not the newest one of its instance id."""
    why = f"a newer stream registered {instance_id}: give each start of a worker an id of its own"
    return Failure(Reason.TAKEN_OVER, why)


def merged(old: Entry | None, instance: Instance, lease: Lease, *, takes_over: bool) -> Instance:
    """The record to store when `instance` is put over `old`. A draining instance stays draining.

    Raises Failure(TAKEN_OVER) if the record is on another lease and `takes_over` is false: a registration that
    reconnects late must not replace its successor.
    """
    if old is None:
        return instance
    if old.lease_id != lease.lease_id and not takes_over:
        raise taken_over(instance.instance_id)
    return drained(instance) if old.instance.state == INSTANCE_STATE_DRAINING else instance


def drained(instance: Instance) -> Instance:
    """A copy of the record, marked as draining."""
    marked = Instance()
    marked.CopyFrom(instance)
    marked.state = INSTANCE_STATE_DRAINING
    return marked


def not_found(instance_id: str) -> Failure:
    return Failure(Reason.INSTANCE_NOT_FOUND, f"no instance {quoted(instance_id)} is registered", param="instance_id")
