"""The costs of a registry against the number of instances and watchers: its real handlers, with fake clients."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench.growth.curve import Curve, wait_until
from services.registry.etcd_store import EtcdStore
from services.registry.memory_store import MemoryStore
from services.registry.service import RegistryService
from services.registry.store import Store
from services.registry.watch_cache import Entry, WatchCache
from services.stubs.registry_pb2 import RegisterRequest, RegisterResponse, WatchRequest, WatchResponse
from tests.registry.support import Etcd, instance, register, until

INSTANCES = (10, 100, 1_000, 10_000)
WATCHERS = (1, 10, 100, 1_000)
CHANGES = 20
"""Changes per repeat."""
LEASE_S = 300
PUTS_AT_ONCE = 50


class Client:
    """The client end of one rpc. Encodes each message it receives, as for the wire, and counts it."""

    def __init__(self, *requests: RegisterRequest) -> None:
        self._requests = list(requests)
        self.message_count = 0
        self.revision = 0

    async def read(self) -> Any:
        if self._requests:
            return self._requests.pop()
        return await asyncio.Event().wait()  # Keeps the rpc open and sends nothing more.

    async def write(self, message: WatchResponse | RegisterResponse) -> None:
        message.SerializeToString()
        self.message_count += 1
        self.revision = message.revision

    def has_seen(self, view: WatchCache) -> bool:
        return self.message_count > 0 and self.revision >= view.revision

    def send_head(self, _metadata: object) -> None:
        """It would be the same for every client."""


class Registry:
    """A registry with this many watchers."""

    def __init__(self, group: asyncio.TaskGroup, store: Store, watchers: int) -> None:
        self.store = store
        self._service, self._group = RegistryService(store), group
        self.watchers = [Client() for _ in range(watchers)]
        self._tasks = [self._watch(one) for one in self.watchers]

    def _watch(self, client: Client) -> "asyncio.Task[None]":
        context: Any = client
        return self._group.create_task(self._service.Watch(WatchRequest(), context))

    def register(self, name: str) -> None:
        context: Any = Client(register(instance(name), LEASE_S))
        self._tasks.append(self._group.create_task(self._service.Register(None, context)))

    async def wait_notified(self) -> None:
        """Wait until all watchers have the store's latest revision."""
        for one in self.watchers:
            await wait_until(partial(one.has_seen, self.store.cache))

    async def us_to_watch(self) -> float:
        """Return the time until one more watcher, the first since a change, has all instances."""
        await self.store.put(instance("w0"), await self.store.grant(LEASE_S), takes_over=True)
        await self.wait_notified()
        began = time.process_time()
        self.watchers.append(client := Client())
        self._tasks.append(self._watch(client))
        await self.wait_notified()
        return (time.process_time() - began) * 1e6

    async def us_to_change(self, size: int) -> float:
        """Return the mean time until all watchers have received one change."""
        leases = [await self.store.grant(LEASE_S) for _ in range(CHANGES)]
        began = time.process_time()
        for number, lease in enumerate(leases):
            await self.store.put(instance(f"w{number % size}", model=f"m{number}"), lease, takes_over=True)
            await self.wait_notified()
        return (time.process_time() - began) * 1e6 / CHANGES

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def registry_with(instances: int, watchers: int) -> AsyncIterator[Registry]:
    """Start a registry over a store in memory that already has this many instances."""
    store = MemoryStore()
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(store.run())
        if instances:
            store.cache.change(1, {f"w{number}": Entry(instance(f"w{number}"), 0) for number in range(instances)})
        registry = Registry(group, store, watchers)
        await registry.wait_notified()
        try:
            yield registry
        finally:
            registry.stop()
            keeping.cancel()


async def snapshots(size: int, repeats: int) -> list[float]:
    async with registry_with(size, 0) as registry:
        return [await registry.us_to_watch() / size for _ in range(repeats)]


async def changes(size: int, repeats: int) -> list[float]:
    async with registry_with(size, 1) as registry:
        return [await registry.us_to_change(size) for _ in range(repeats)]


async def changes_per_watcher(size: int, repeats: int) -> list[float]:
    async with registry_with(100, size) as registry:
        return [await registry.us_to_change(100) / size for _ in range(repeats)]


async def registrations(size: int, repeats: int) -> list[float]:
    """Many instances register at once while ten watchers are connected."""
    costs = []
    for _ in range(repeats):
        async with registry_with(0, 10) as registry:
            began = time.process_time()
            for number in range(size):
                registry.register(f"w{number}")
            await wait_until(lambda: len(registry.store.cache.entries) == size)
            await registry.wait_notified()
            costs.append((time.process_time() - began) * 1e6 / size)
    return costs


async def etcd_changes(size: int, repeats: int) -> list[float]:
    """One change in a real etcd with many keys: from the store's call to the watch cache."""
    async with etcd_store() as store, asyncio.TaskGroup() as group:
        await put_instances(store, size)
        registry = Registry(group, store, 1)
        await registry.wait_notified()
        costs = [await registry.us_to_change(size) for _ in range(repeats)]
        registry.stop()
    return costs


@asynccontextmanager
async def etcd_store() -> AsyncIterator[Store]:
    """Start an etcd of its own, and a store over it."""
    with tempfile.TemporaryDirectory() as folder:
        etcd = Etcd(Path(folder))
        etcd.start()
        etcd.wait_listening()
        try:
            async with asyncio.TaskGroup() as group:
                store = EtcdStore(etcd.config)
                keeping = group.create_task(store.run())
                await until(lambda: store.cache.is_known)
                yield store
                keeping.cancel()
        finally:
            etcd.kill()


async def renewals(size: int, repeats: int) -> list[float]:
    """Many leases are renewed one after another."""
    async with registry_with(0, 0) as registry:
        return await us_to_renew(registry.store, size, repeats)


async def etcd_renewals(size: int, repeats: int) -> list[float]:
    async with etcd_store() as store:
        return await us_to_renew(store, size, repeats)


async def us_to_renew(store: Store, leases: int, repeats: int) -> list[float]:
    granted = [await store.grant(LEASE_S) for _ in range(leases)]
    costs = []
    for _ in range(repeats):
        began = time.process_time()
        for lease in granted:
            await store.keep_alive(lease)
        costs.append((time.process_time() - began) * 1e6 / leases)
    return costs


async def put_instances(store: Store, size: int) -> None:
    """Put this many instances, all on one lease."""
    lease = await store.grant(LEASE_S)
    for start in range(0, size, PUTS_AT_ONCE):
        async with asyncio.TaskGroup() as group:
            for number in range(start, min(size, start + PUTS_AT_ONCE)):
                group.create_task(store.put(instance(f"w{number}"), lease, takes_over=True))
    while len(store.cache.entries) < size:
        await store.cache.wait_change()


INSTANCE, CHANGE = "an instance in a registry", "a change in a registry"
CURVES: Sequence[Curve] = (
    Curve(INSTANCE, "send all instances to a new watcher, per instance", "instances", INSTANCES, snapshots),
    Curve(CHANGE, "send one change", "instances", INSTANCES, changes),
    Curve(CHANGE, "send one change, per watcher", "watchers", WATCHERS, changes_per_watcher),
    Curve(INSTANCE, "register, all at once", "instances", INSTANCES, registrations),
    Curve(INSTANCE, "renew a lease", "instances", INSTANCES, renewals),
)
ETCD_CURVES: Sequence[Curve] = (
    Curve(CHANGE, "send one change, over etcd", "instances", INSTANCES, etcd_changes),
    Curve(INSTANCE, "renew a lease, over etcd", "instances", INSTANCES[:-1], etcd_renewals),
)
