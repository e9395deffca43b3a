"""Keeps a worker registered."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from services.discovery.client import (
    DEREGISTER_TIMEOUT_S,
    FIRST_ANSWER_TIMEOUT_S,
    InstanceRecord,
    RegisterCall,
    _request,
    _stay_connected,
    log,
)
from services.runtime.tasks import root_cause
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_DRAINING,
    Deregister,
    Instance,
    RegisterRequest,
    RegisterResponse,
)

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone


class Registrar:
    """Keeps one worker registered: again after every loss, on whichever registry answers.

    lease_s: whole seconds, 1 to 300: how long the record outlives this process. on_drain: called once, on the event
    loop, when somebody asked the registry to drain this instance.
    """

    def __init__(
        self, addresses: Sequence[str], record: InstanceRecord, *, lease_s: int, on_drain: Callable[[], None]
    ) -> None:
        self._addresses = addresses
        self._record = record
        self._lease_s = lease_s
        self._on_drain: Callable[[], None] | None = on_drain
        self._leave = asyncio.Event()
        self._hung_up = asyncio.Event()
        self._hung_up.set()
        self._stopped = asyncio.Event()
        self._stopped.set()

    async def deregister(self) -> None:
        """Leave: `run` ends, and nothing registers this instance again. Bounded by DEREGISTER_TIMEOUT_S; idempotent."""
        self._leave.set()
        await self._stopped.wait()

    async def run(self) -> None:
        """Stay registered until cancelled, or until `deregister`."""
        self._stopped.clear()
        try:
            async with asyncio.TaskGroup() as group:
                staying = group.create_task(_stay_connected(self._addresses, self._register, "registration"))
                await self._leave.wait()
                await self._wait_hung_up()
                staying.cancel()
        finally:
            self._stopped.set()

    async def _wait_hung_up(self) -> None:
        """Until the stream, if there is one, has said goodbye or broken."""
        try:
            async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                await self._hung_up.wait()
        except TimeoutError:
            log.warning("the registry did not confirm the deregistration: the record goes with its lease")

    async def _register(self, stub: "RegistryAsyncStub", on_up: Callable[[], None]) -> bool:
        if self._leave.is_set():
            return True
        call = stub.Register()
        self._hung_up.clear()
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._send(call))
                await self._receive(call, on_up)
                sending.cancel()
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            self._hung_up.set()
        return self._leave.is_set()

    async def _send(self, call: RegisterCall) -> None:
        try:
            await call.write(_request(self._record, self._lease_s))
            await self._leave.wait()
            await call.write(RegisterRequest(deregister=Deregister()))
        except asyncio.InvalidStateError:
            return  # The stream is over: `_receive` says why.

    async def _receive(self, call: RegisterCall, on_up: Callable[[], None]) -> None:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            response = await call.read()
        while isinstance(response, RegisterResponse):
            on_up()
            self._heed(response.instance)
            response = await call.read()

    def _heed(self, instance: Instance) -> None:
        if instance.state == INSTANCE_STATE_DRAINING and self._on_drain is not None:
            on_drain, self._on_drain = self._on_drain, None
            on_drain()
