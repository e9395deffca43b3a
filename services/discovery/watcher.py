"""A frontend's view of the registered instances."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.discovery.client import FIRST_ANSWER_TIMEOUT_S, InstanceRecord, OnChange, _record, _stay_connected
from services.stubs.registry_pb2 import (
    WatchRequest,
    WatchResponse,
)

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone


class Watcher:
    """Keeps the view of all instances; `on_change` is called, on the event loop, at each change of it, and when a
    registry has answered for the first time, though nobody may be there.

    While no registry answers, the last view stays. A registry that lost its memory is believed: what it says is the
    view.
    """

    def __init__(self, addresses: Sequence[str], on_change: OnChange) -> None:
        self._addresses = addresses
        self._on_change = on_change
        self._records: dict[str, InstanceRecord] = {}
        self._revision = 0
        self._epoch = ""

    @property
    def is_synced(self) -> bool:
        """Has there ever been a view?"""
        return bool(self._epoch)

    async def run(self) -> None:
        """Watch until cancelled."""
        await _stay_connected(self._addresses, self._watch, "watch")

    async def _watch(self, stub: "RegistryAsyncStub", on_up: Callable[[], None]) -> bool:
        call = stub.Watch(WatchRequest(revision=self._revision, epoch=self._epoch))
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            response = await call.read()
        on_up()
        while isinstance(response, WatchResponse):
            self._take(response)
            response = await call.read()
        return False

    def _take(self, response: WatchResponse) -> None:
        """Costs what the response holds, however many instances there are."""
        was_synced = self.is_synced
        said = {instance.instance_id: _record(instance) for instance in response.put}
        put = {name: record for name, record in said.items() if self._records.get(name) != record}
        left = self._records.keys() - said.keys() if response.snapshot else response.deleted
        gone = [instance_id for instance_id in left if self._records.pop(instance_id, None) is not None]
        self._records.update(put)
        self._revision, self._epoch = response.revision, response.epoch
        if put or gone or not was_synced:
            self._on_change(put, gone)
