"""The shared store: records are kept in etcd on leases, so any number of registries serve the same set.

All keys have one prefix. `instances/<id>` holds a serialised Instance and is attached to the lease of its registration.
`epoch` names this history; the first registry that finds no epoch creates one at random. An etcd that lost its data has
lost the epoch too, so watchers get a snapshot. An etcd that was restored from an old backup gets a new epoch for the
same reason.
"""

import asyncio
import random
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import structlog
from etcd3aio._protobuf import Compare, WatchResponse
from etcd3aio.kv import KVService, prefix_range_end
from google.protobuf.message import DecodeError

from services.core.errors import Failure, Reason
from services.registry.config import EtcdConfig
from services.registry.etcd_client import EtcdClient, Member, NotFound
from services.registry.store import Lease, LeaseLost, Stored, drained, merged, not_found
from services.registry.watch_cache import Entry, WatchCache
from services.runtime.backoff import Backoff
from services.runtime.log_throttle import LogThrottle
from services.stubs.registry_pb2 import Instance

log = structlog.get_logger()

PREFIX = b"/unbroken/v1/"
INSTANCES = PREFIX + b"instances/"
EPOCH = PREFIX + b"epoch"
END = prefix_range_end(PREFIX)
CONFLICTS_MAX = 8
"""How often a write is tried if another write changes the record between its read and its write."""


class EtcdStore:
    """Reads and writes etcd. The cache follows etcd by a watch, and stays unchanged while etcd is unavailable."""

    def __init__(self, config: EtcdConfig, cache: WatchCache | None = None) -> None:
        self._cache = cache or WatchCache()
        self._client = EtcdClient(config)
        self._timeout_s = config.call_timeout_s
        self._outage = LogThrottle()

    @property
    def cache(self) -> WatchCache:
        return self._cache

    async def run(self) -> None:
        """Follow etcd until cancelled: read everything, watch later changes, and start again when the watch ends."""
        backoff, rng, tries = Backoff(), random.Random(), 0
        loop = asyncio.get_running_loop()
        try:
            while True:
                began = loop.time()
                await self._load_and_watch()
                tries = 0 if loop.time() - began > backoff.cap_s else tries + 1
                await asyncio.sleep(backoff.delay_s(tries, rng))
        finally:
            await self._client.close()

    async def grant(self, lease_s: int) -> Lease:
        granted = await self._client.call(lambda member: member.leases.grant(lease_s, timeout=self._timeout_s))
        return Lease(granted.ID, granted.TTL)

    async def keep_alive(self, lease: Lease) -> None:
        try:
            await self._client.call(lambda member: member.keep_alive(lease.lease_id))
        except NotFound:
            raise LeaseLost from None

    async def put(self, instance: Instance, lease: Lease, *, takes_over: bool) -> Stored:
        def change(old: Entry | None) -> Entry:
            return Entry(merged(old, instance, lease, takes_over=takes_over), lease.lease_id)

        try:
            return await self._write(instance.instance_id, change)
        except NotFound:
            raise LeaseLost from None

    async def revoke(self, lease: Lease) -> None:
        try:
            await self._client.call(lambda member: member.leases.revoke(lease.lease_id, timeout=self._timeout_s))
        except NotFound:
            return  # The lease has expired, and its record with it.

    async def drain(self, instance_id: str) -> Instance:
        def change(old: Entry | None) -> Entry:
            if old is None:
                raise not_found(instance_id)
            return Entry(drained(old.instance), old.lease_id)

        try:
            return (await self._write(instance_id, change)).instance
        except NotFound:
            raise not_found(instance_id) from None

    async def _write(self, instance_id: str, change: Callable[[Entry | None], Entry]) -> Stored:
        """Read the record, change it, and write it back if it is unchanged since the read.

        Raises NotFound if its lease has expired, Failure(STORE_AWAY).
        """
        key = INSTANCES + instance_id.encode()
        for _ in range(CONFLICTS_MAX):
            found = await self._get(key)
            new = change(_entry(found.kvs[0]) if found.kvs else None)
            unchanged = Compare(
                result=Compare.EQUAL,
                target=Compare.MOD,
                key=key,
                mod_revision=found.kvs[0].mod_revision if found.kvs else 0,
            )
            put = KVService.txn_op_put(key, new.instance.SerializeToString(), lease=new.lease_id)
            if (revision := await self._commit(unchanged, put)) is not None:
                return Stored(new.instance, revision)
        raise Failure(Reason.STORE_AWAY, f"the record of {instance_id} changed during each of {CONFLICTS_MAX} writes")

    async def _load_and_watch(self) -> None:
        """Load the cache and follow etcd. Returns when the watch ends, for whatever reason."""
        try:
            await self._load()
        except Failure as failure:
            self._log_outage(failure)
            return
        try:
            # Only on this member: on one that has lost its data, a watch would wait for a revision far in the future.
            await self._client.call(self._watch, members_max=1)
        except Failure as failure:
            log.info("the watch on etcd failed", why=failure.detail)
        except _EpochEnded:
            log.info("etcd has a new epoch")

    async def _load(self) -> None:
        """Set the cache to the current state of etcd."""
        while True:
            found = await self._get(PREFIX, END)
            epoch = next((kv.value.decode(errors="replace") for kv in found.kvs if kv.key == EPOCH), "")
            is_restored = epoch == self._cache.epoch and found.header.revision < self._cache.revision
            if epoch and not is_restored:
                break
            await self._begin_epoch(epoch)
        self._update_cache(epoch, found.header.revision, dict(_instances(found.kvs)))

    async def _begin_epoch(self, old: str) -> None:
        """Replace the epoch `old` by a new one, unless another registry has replaced it already."""
        unchanged = KVService.txn_compare_value(EPOCH, old) if old else KVService.txn_compare_create_revision(EPOCH, 0)
        await self._commit(unchanged, KVService.txn_op_put(EPOCH, secrets.token_hex(8)))

    def _update_cache(self, epoch: str, revision: int, entries: dict[str, Entry]) -> None:
        if not (self._outage.is_quiet and self._cache.is_known):
            self._outage.reset()
            log.info("etcd answers", revision=revision, instances=len(entries))
        if epoch != self._cache.epoch:
            self._cache.replace(epoch, revision, entries)
        elif revision > self._cache.revision:
            old = self._cache.entries
            put = {instance_id: entry for instance_id, entry in entries.items() if old.get(instance_id) != entry}
            self._cache.change(revision, put, [instance_id for instance_id in old if instance_id not in entries])

    async def _watch(self, member: Member) -> None:
        await member.watch(PREFIX, END, self._cache.revision + 1, self._on_watch_response)

    def _on_watch_response(self, response: WatchResponse) -> None:
        """Apply one message of the watch, which holds one or more complete revisions."""
        if any(event.kv.key == EPOCH for event in response.events):
            raise _EpochEnded
        if not response.events:
            return
        last = {event.kv.key: event for event in response.events}
        put = dict(_instances(event.kv for event in last.values() if event.type != event.DELETE))
        gone = [instance_id for key in last if (instance_id := _id(key)) is not None and instance_id not in put]
        self._cache.change(max(event.kv.mod_revision for event in response.events), put, gone)

    async def _get(self, key: bytes, range_end: bytes | None = None) -> Any:
        return await self._client.call(lambda member: member.kv.get(key, range_end=range_end, timeout=self._timeout_s))

    async def _commit(self, compare: Compare, put: Any) -> int | None:
        """Write if the comparison holds. Returns the revision of the write, or None if it does not hold."""
        done = await self._client.call(lambda member: member.kv.txn([compare], [put], timeout=self._timeout_s))
        return done.header.revision if done.succeeded else None

    def _log_outage(self, failure: Failure) -> None:
        if not self._outage.should_log():
            return
        if self._cache.is_known:
            instances = len(self._cache.entries)
            log.warning("etcd is unavailable: serving the last known state", why=failure.detail, instances=instances)
        else:
            log.warning("etcd not reached yet: trying again", why=failure.detail)


class _EpochEnded(Exception):
    """Another registry has begun a new epoch: everything must be read again."""


def _instances(kvs: Iterable[Any]) -> Iterable[tuple[str, Entry]]:
    for kv in kvs:
        if (instance_id := _id(kv.key)) is not None and (entry := _entry(kv)) is not None:
            yield instance_id, entry


def _id(key: bytes) -> str | None:
    return key.removeprefix(INSTANCES).decode(errors="replace") if key.startswith(INSTANCES) else None


def _entry(kv: Any) -> Entry | None:
    """Parse a record. Returns None if the value is not an Instance."""
    try:
        return Entry(Instance.FromString(kv.value), kv.lease)
    except DecodeError:
        log.warning("a value in etcd is not an instance", key=kv.key)
        return None
