"""Keeps one instance's record in the store for as long as its stream lives, whatever the store does meanwhile."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

import structlog

from services.core.errors import Failure, Reason
from services.registry.store import Lease, LeaseLost, Store
from services.runtime.backoff import Backoff
from services.stubs.registry_pb2 import Instance, RegisterResponse

log = structlog.get_logger()

RENEWALS_PER_LEASE = 3
"""Two renewals may be lost before the lease is."""
TELL_TIMEOUT_S = 5.0
"""A client that does not read its stream for so long is broken off."""
LEASES_REMEMBERED_MAX = 8
LINGER_TIMEOUT_S = 1.0
"""For the last renewal, when a stream broke."""

Message = TypeVar("Message")
Tell = Callable[[RegisterResponse], Awaitable[None]]


async def tell_in_time(tell: Callable[[Message], Awaitable[None]], message: Message) -> None:
    """Raises SLOW_CLIENT when the client has not taken it after TELL_TIMEOUT_S."""
    try:
        async with asyncio.timeout(TELL_TIMEOUT_S):
            await tell(message)
    except TimeoutError:
        raise Failure(Reason.SLOW_CLIENT, f"the client has read nothing for {TELL_TIMEOUT_S:g} s") from None


class Registration:
    """One Register stream's record.

    `run` grants, puts, renews, and does it again after every loss, until it is cancelled; it raises Failure when the
    record was taken over or the client does not read. Whoever ran it then calls `linger` or `remove`.
    """

    def __init__(self, store: Store, instance: Instance, lease_s: int, tell: Tell) -> None:
        self._store = store
        self._wanted = instance
        self._asked: Instance | None = None
        self._lease_s = lease_s
        self._tell = tell
        self._told: Instance | None = None
        self._lease: Lease | None = None
        self._lease_ids: deque[int] = deque(maxlen=LEASES_REMEMBERED_MAX)
        self._revision = 0
        self._was_stored = False
        self._news = asyncio.Event()
        self._backoff = Backoff()
        self._tries = 0

    def update(self, instance: Instance) -> None:
        """Replace the record. Raises Failure(INVALID_ARGUMENT) for another instance id."""
        if instance.instance_id != self._wanted.instance_id:
            raise Failure(Reason.INVALID_ARGUMENT, "a stream registers one instance id", param="instance.instance_id")
        self._wanted = instance
        self._news.set()

    async def run(self) -> NoReturn:
        rng = random.Random()
        with self._store.view.listening(self._wanted.instance_id, self._news.set):
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
        """Take the record away. Raises Failure(STORE_AWAY): it then goes with its lease."""
        if self._lease is not None:
            await self._store.revoke(self._lease)

    async def linger(self) -> None:
        """Let the record stay for a whole lease from now. Best effort, within LINGER_TIMEOUT_S."""
        try:
            async with asyncio.timeout(LINGER_TIMEOUT_S):
                if self._lease is not None:
                    await self._store.keep_alive(self._lease)
        except (LeaseLost, Failure, TimeoutError) as error:
            log.debug("the record may go early", instance_id=self._wanted.instance_id, why=str(error))

    async def _keep(self) -> NoReturn:
        if self._lease is None:
            self._lease = await self._store.grant(self._lease_s)
            self._lease_ids.append(self._lease.lease_id)
            self._asked = None
        else:
            await self._store.keep_alive(self._lease)
        while True:
            if self._wanted is not self._asked:
                await self._put(self._wanted, self._lease)
            await self._look(self._lease)
            self._tries = 0
            if not await self._wait_news(self._lease.granted_s / RENEWALS_PER_LEASE):
                await self._store.keep_alive(self._lease)

    async def _put(self, wanted: Instance, lease: Lease) -> None:
        stored = await self._store.put(wanted, lease, takes_over=not self._was_stored)
        self._asked, self._was_stored, self._revision = wanted, True, stored.revision
        await self._send(stored.instance, lease)

    async def _look(self, lease: Lease) -> None:
        """What have others done to the record since the last put? A view that has not come so far does not know.

        Nor does the view of an etcd that lost its data meanwhile: its revision is higher, but the lease in it is one
        of ours from before.
        """
        view = self._store.view
        if view.revision < self._revision:
            return
        entry = view.entries.get(self._wanted.instance_id)
        if entry is None:
            raise LeaseLost
        if entry.lease_id not in self._lease_ids:
            raise Failure(Reason.TAKEN_OVER, f"a newer stream registered {self._wanted.instance_id}")
        if entry.lease_id == lease.lease_id and entry.instance != self._told:
            await self._send(entry.instance, lease)

    async def _send(self, instance: Instance, lease: Lease) -> None:
        response = RegisterResponse(instance=instance, revision=self._revision)
        response.lease.FromMilliseconds(round(lease.granted_s * 1e3))
        await tell_in_time(self._tell, response)
        self._told = instance

    async def _wait_news(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return False
        self._news.clear()
        return True
