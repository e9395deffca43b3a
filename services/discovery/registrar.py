"""Keeps a worker registered with the registry."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.discovery.client import (
    DEREGISTER_TIMEOUT_S,
    FIRST_ANSWER_TIMEOUT_S,
    InstanceRecord,
    RegisterCall,
    log,
    registration_request,
    stay_connected,
)
from services.runtime.tasks import root_cause, wait_event
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_DRAINING,
    Deregister,
    Instance,
    RegisterRequest,
    RegisterResponse,
)
from services.tls.peers import Peers

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone


class Registrar:
    """Keeps one worker registered, and registers it again after every loss, with any registry that answers.

    lease_s: how long the record outlives this process, in whole seconds from 1 to 300.
    on_drain: called once, on the event loop, when the registry is asked to drain this instance.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        record: InstanceRecord,
        *,
        lease_s: int,
        on_drain: Callable[[], None],
        peers: Peers | None = None,
    ) -> None:
        self._addresses = addresses
        self._peers = peers
        self._record = record
        self._lease_s = lease_s
        self._on_drain: Callable[[], None] | None = on_drain
        self._leaving = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._disconnected.set()
        self._stopped = asyncio.Event()
        self._stopped.set()

    async def deregister(self) -> None:
        """Deregister and end `run`. Idempotent. Takes at most DEREGISTER_TIMEOUT_S."""
        self._leaving.set()
        await self._stopped.wait()

    async def run(self) -> None:
        """Stay registered until cancelled or until `deregister` is called."""
        self._stopped.clear()
        try:
            async with asyncio.TaskGroup() as group:
                staying = stay_connected(self._addresses, self._register, "registration", self._peers)
                connection = group.create_task(staying)
                await self._leaving.wait()
                await self._wait_disconnected()
                connection.cancel()
        finally:
            self._stopped.set()

    async def _wait_disconnected(self) -> None:
        """Wait until the stream, if one is open, has deregistered or failed."""
        if not await wait_event(self._disconnected, DEREGISTER_TIMEOUT_S):
            log.warning("the registry did not confirm the deregistration: the record expires with its lease")

    async def _register(self, stub: "RegistryAsyncStub", on_up: Callable[[], None]) -> bool:
        if self._leaving.is_set():
            return True
        call = stub.Register()
        self._disconnected.clear()
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(call))
                await self._receive(call, on_up)
                sending.cancel()
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            self._disconnected.set()
        return self._leaving.is_set()

    async def _send(self, call: RegisterCall) -> None:
        try:
            await call.write(registration_request(self._record, self._lease_s))
            await self._leaving.wait()
            await call.write(RegisterRequest(deregister=Deregister()))
        except asyncio.InvalidStateError:
            return  # The stream has ended: `_receive` raises the reason.

    async def _receive(self, call: RegisterCall, on_up: Callable[[], None]) -> None:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            response = await call.read()
        while isinstance(response, RegisterResponse):
            on_up()
            self._check_drain(response.instance)
            response = await call.read()

    def _check_drain(self, instance: Instance) -> None:
        """Call `on_drain`, once, if the registry has marked the instance as draining."""
        if instance.state == INSTANCE_STATE_DRAINING and self._on_drain is not None:
            on_drain, self._on_drain = self._on_drain, None
            on_drain()
