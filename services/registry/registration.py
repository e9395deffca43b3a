"""Keeps the record of one instance in the store while its Register stream is open, across outages of the store."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import structlog

from services.core.errors import Failure, Reason
from services.registry.store import Lease, LeaseLost, Store, taken_over
from services.runtime.backoff import Backoff
from services.runtime.tasks import wait_event
from services.stubs.registry_pb2 import Instance, RegisterResponse

log = structlog.get_logger()

RENEWALS_PER_LEASE = 3
"""The lease survives the loss of two renewals."""
SEND_TIMEOUT_S = 5.0
"""How long a message to a client may wait to be sent. The stream of a client that does not read it then ends."""
LEASES_REMEMBERED_MAX = 8
LINGER_TIMEOUT_S = 1.0
"""Timeout of the last renewal, when a stream has broken."""

Message = TypeVar("Message")
Send = Callable[[RegisterResponse], Awaitable[None]]


async def send_in_time(send: Callable[[Message], Awaitable[None]], message: Message) -> None:
    """Send `message`. Raises SLOW_CLIENT if that takes longer than SEND_TIMEOUT_S."""
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise Failure(Reason.SLOW_CLIENT, f"the client has read nothing for {SEND_TIMEOUT_S:g} s") from None


class Registration:
    """The record of one Register stream.

    `run` gets a lease, puts the record and renews the lease, and starts again after every loss, until it is cancelled.
    It raises Failure if another stream took the record over or the client does not read. The caller of `run` must then
    call `linger` or `remove`.
    """

    def __init__(self, store: Store, instance: Instance, lease_s: int, send: Send) -> None:
        self._store = store
        self._wanted = instance
        self._put_last: Instance | None = None
        self._lease_s = lease_s
        self._send = send
        self._sent_last: Instance | None = None
        self._lease: Lease | None = None
        self._lease_ids: deque[int] = deque(maxlen=LEASES_REMEMBERED_MAX)
        self._revision = 0
        self._was_stored = False
        self._has_changed = asyncio.Event()
        self._backoff = Backoff()
        self._tries = 0

    def update(self, instance: Instance) -> None:
        """Replace the record. Raises Failure(INVALID_ARGUMENT) if the instance id differs."""
        if instance.instance_id != self._wanted.instance_id:
            raise Failure(Reason.INVALID_ARGUMENT, "a stream registers one instance id", param="instance.instance_id")
        self._wanted = instance
        self._has_changed.set()

    async def run(self) -> NoReturn:
        """Keep the record in the store until cancelled. Raises Failure(TAKEN_OVER), Failure(SLOW_CLIENT)."""
        rng = random.Random()
        with self._store.cache.listening(self._wanted.instance_id, self._has_changed.set):
            while True:
                try:
                    await self._keep()
                except LeaseLost:
                    log.warning("lease lost, registering again", instance_id=self._wanted.instance_id)
                    self._lease = None
                except Failure as failure:
                    if failure.reason is not Reason.STORE_AWAY:
                        raise
                await asyncio.sleep(self._backoff.delay_s(self._tries, rng))
                self._tries += 1

    async def remove(self) -> None:
        """Remove the record. Raises Failure(STORE_AWAY); the record then expires with its lease."""
        if self._lease is not None:
            await self._store.revoke(self._lease)

    async def linger(self) -> None:
        """Renew the lease once more, so that the record stays for its full time. Gives up after LINGER_TIMEOUT_S."""
        try:
            async with asyncio.timeout(LINGER_TIMEOUT_S):
                if self._lease is not None:
                    await self._store.keep_alive(self._lease)
        except (LeaseLost, Failure, TimeoutError) as error:
            log.debug("the record may expire early", instance_id=self._wanted.instance_id, why=str(error))

    async def _keep(self) -> NoReturn:
        if self._lease is None:
            self._lease = await self._store.grant(self._lease_s)
            self._lease_ids.append(self._lease.lease_id)
            self._put_last = None
        else:
            await self._store.keep_alive(self._lease)
        while True:
            if self._wanted is not self._put_last:
                await self._put(self._wanted, self._lease)
            await self._check_stored(self._lease)
            self._tries = 0
            if not await self._wait_change(self._lease.granted_s / RENEWALS_PER_LEASE):
                await self._store.keep_alive(self._lease)

    async def _put(self, wanted: Instance, lease: Lease) -> None:
        stored = await self._store.put(wanted, lease, takes_over=not self._was_stored)
        self._put_last, self._was_stored, self._revision = wanted, True, stored.revision
        await self._send_state(stored.instance, lease)

    async def _check_stored(self, lease: Lease) -> None:
        """React to changes that others have made to the record since the last put.

        A cache that has not reached that revision is ignored. After etcd has lost its data the cache may have a higher
        revision with an older lease of this registration, which is ignored, too.
        """
        cache = self._store.cache
        if cache.revision < self._revision:
            return
        entry = cache.entries.get(self._wanted.instance_id)
        if entry is None:
            raise LeaseLost
        if entry.lease_id not in self._lease_ids:
            raise taken_over(self._wanted.instance_id)
        if entry.lease_id == lease.lease_id and entry.instance != self._sent_last:
            await self._send_state(entry.instance, lease)

    async def _send_state(self, instance: Instance, lease: Lease) -> None:
        response = RegisterResponse(instance=instance, revision=self._revision)
        response.lease.FromMilliseconds(round(lease.granted_s * 1e3))
        await send_in_time(self._send, response)
        self._sent_last = instance

    async def _wait_change(self, timeout_s: float) -> bool:
        """Wait for a change of the wanted or the stored record. Returns False on timeout."""
        has_changed = await wait_event(self._has_changed, timeout_s)
        if has_changed:
            self._has_changed.clear()
        return has_changed
