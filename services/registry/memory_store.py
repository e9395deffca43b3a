"""The embedded store: keeps records in the memory of this process."""

import asyncio
import itertools
import secrets
from collections.abc import Mapping

from services.registry.store import Lease, LeaseLost, Stored, drained, merged, not_found
from services.registry.watch_cache import Entry, WatchCache
from services.stubs.registry_pb2 import Instance


class MemoryStore:
    """Keeps records in memory. Each start begins a new history with a random epoch. Leases expire by the event loop's
    clock."""

    def __init__(self, cache: WatchCache | None = None) -> None:
        self._cache = cache or WatchCache()
        self._cache.replace(secrets.token_hex(8), 0, {})
        self._lease_ids = itertools.count(1)
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._record_of: dict[int, str] = {}

    @property
    def cache(self) -> WatchCache:
        return self._cache

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for timer in self._timers.values():
                timer.cancel()

    async def grant(self, lease_s: int) -> Lease:
        lease = Lease(next(self._lease_ids), lease_s)
        self._start_timer(lease)
        return lease

    async def keep_alive(self, lease: Lease) -> None:
        self._check(lease)
        self._start_timer(lease)

    async def put(self, instance: Instance, lease: Lease, *, takes_over: bool) -> Stored:
        self._check(lease)
        instance_id = instance.instance_id
        record = merged(self._cache.entries.get(instance_id), instance, lease, takes_over=takes_over)
        self._record_of[lease.lease_id] = instance_id
        self._change({instance_id: Entry(record, lease.lease_id)})
        return Stored(record, self._cache.revision)

    async def revoke(self, lease: Lease) -> None:
        self._lapse(lease.lease_id)

    async def drain(self, instance_id: str) -> Instance:
        old = self._cache.entries.get(instance_id)
        if old is None:
            raise not_found(instance_id)
        marked = drained(old.instance)
        if marked != old.instance:
            self._change({instance_id: Entry(marked, old.lease_id)})
        return marked

    def _change(self, put: Mapping[str, Entry], deleted: tuple[str, ...] = ()) -> None:
        self._cache.change(self._cache.revision + 1, put, deleted)

    def _check(self, lease: Lease) -> None:
        if lease.lease_id not in self._timers:
            raise LeaseLost

    def _start_timer(self, lease: Lease) -> None:
        if (timer := self._timers.get(lease.lease_id)) is not None:
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._timers[lease.lease_id] = loop.call_later(lease.granted_s, self._lapse, lease.lease_id)

    def _lapse(self, lease_id: int) -> None:
        if (timer := self._timers.pop(lease_id, None)) is not None:
            timer.cancel()
        instance_id = self._record_of.pop(lease_id, None)
        entry = None if instance_id is None else self._cache.entries.get(instance_id)
        if instance_id is not None and entry is not None and entry.lease_id == lease_id:
            self._change({}, (instance_id,))
