"""Watches the registered instances for a frontend."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.discovery.client import FIRST_ANSWER_TIMEOUT_S, InstanceRecord, OnChange, record_from_wire, stay_connected
from services.stubs.registry_pb2 import (
    WatchRequest,
    WatchResponse,
)
from services.tls.peers import Peers

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone


class Watcher:
    """Keeps the set of registered instances and reports its changes.

    `on_change` is called on the event loop for each change. It is also called when a registry has answered for the
    first time, even if no instance is registered. While no registry answers, the last set stays. A registry that lost
    its data is believed: its set replaces the old one.
    """

    def __init__(self, addresses: Sequence[str], on_change: OnChange, peers: Peers | None = None) -> None:
        self._addresses = addresses
        self._peers = peers
        self._on_change = on_change
        self._records: dict[str, InstanceRecord] = {}
        self._revision = 0
        self._epoch = ""

    @property
    def is_synced(self) -> bool:
        """Whether a registry has ever answered."""
        return bool(self._epoch)

    async def run(self) -> None:
        """Watch until cancelled."""
        await stay_connected(self._addresses, self._watch, "watch", self._peers)

    async def _watch(self, stub: "RegistryAsyncStub", on_up: Callable[[], None]) -> bool:
        call = stub.Watch(WatchRequest(revision=self._revision, epoch=self._epoch))
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            response = await call.read()
        on_up()
        while isinstance(response, WatchResponse):
            self._apply(response)
            response = await call.read()
        return False

    def _apply(self, response: WatchResponse) -> None:
        """Apply a change or a snapshot. The cost depends on the response's size, not on the number of instances."""
        was_synced = self.is_synced
        received = {instance.instance_id: record_from_wire(instance) for instance in response.put}
        put = {name: record for name, record in received.items() if self._records.get(name) != record}
        left = [name for name in self._records if name not in received] if response.snapshot else response.deleted
        gone = [instance_id for instance_id in left if self._records.pop(instance_id, None) is not None]
        self._records.update(put)
        self._revision, self._epoch = response.revision, response.epoch
        if put or gone or not was_synced:
            self._on_change(put, gone)
