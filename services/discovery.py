"""The registry's clients: a worker keeps itself registered, a frontend keeps a view of who is registered.

Both take the addresses of several registries and use one that answers. When all are away both go on with what they
have, and come back with full jitter; an outage is logged now and then, not once per try.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import grpc
import structlog
from google.protobuf.duration_pb2 import Duration

from services.backoff import Backoff
from services.layers import root_cause
from services.reminder import Reminder
from services.rpc import CHANNEL_OPTIONS
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_SERVING,
    Deregister,
    Instance,
    RegisterRequest,
    RegisterResponse,
    WatchRequest,
    WatchResponse,
)
from services.stubs.registry_pb2_grpc import RegistryStub

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone

log = structlog.get_logger()

FIRST_ANSWER_TIMEOUT_S = 5.0
"""A registry that has not answered a new stream by then is taken for lost; the next one is tried."""
DEREGISTER_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for the registry. Without an answer its record goes with its lease."""
BACKOFF = Backoff()

RegisterCall: TypeAlias = "grpc.aio.StreamStreamCall[RegisterRequest, RegisterResponse]"
Session: TypeAlias = "Callable[[RegistryAsyncStub, Callable[[], None]], Awaitable[bool]]"
"""One stream to one registry; calls the callback when it answers, returns True when there is nothing left to do."""


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """One worker. address: host:port of its gRPC services. model: the served model's name.

    is_draining: what the registry says of it; a worker does not say so itself, it deregisters. session_address:
    host:port where it takes sessions; empty: at `address`.
    """

    instance_id: str
    address: str
    model: str
    is_draining: bool = False
    session_address: str = ""

    @property
    def sessions_at(self) -> str:
        """host:port where it takes sessions."""
        return self.session_address or self.address


OnChange: TypeAlias = "Callable[[Mapping[str, InstanceRecord], Collection[str]], None]"
"""Told which instances are new or different, and the ids of those that are gone."""


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


async def _stay_connected(addresses: Sequence[str], session: Session, what: str) -> None:
    """Run `session` on one registry after the other until it returns True."""
    rng, outage = random.Random(), _Outage(what)
    first = rng.randrange(len(addresses))  # Not all clients on the first of them.
    for number in itertools.count(first):
        address = addresses[number % len(addresses)]
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                if await session(RegistryStub(channel), partial(outage.end, address)):
                    return
            outage.begin(address, "the registry ended the stream")
        except TimeoutError:
            outage.begin(address, f"no answer within {FIRST_ANSWER_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            outage.begin(address, _why(error))
        await asyncio.sleep(BACKOFF.delay_s(outage.tries, rng))


def _why(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "something answers there that is no registry: check --registry"
    return f"{error.code().name}: {error.details()}"


class _Outage:
    """Counts tries, and logs the first, some, and the last of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_out = True
        self._was_up = False
        self._reminder = Reminder()
        self._up_at = 0.0
        self.tries = 0

    def end(self, address: str) -> None:
        if self._is_out:
            self._is_out, self._was_up = False, True
            self._reminder.reset()
            self._up_at = asyncio.get_running_loop().time()
            log.info("registry answers", what=self._what, registry=address)

    def begin(self, address: str, why: str) -> None:
        """A session ended. One that lasted begins the back-off anew; one that did not is another try."""
        lasted_s = 0.0 if self._is_out else asyncio.get_running_loop().time() - self._up_at
        self.tries = 0 if lasted_s > BACKOFF.cap_s else self.tries + 1
        self._is_out = True
        is_first = self._reminder.is_quiet
        if self._reminder.take():
            log.warning(self._event(is_first=is_first), what=self._what, registry=address, why=why)

    def _event(self, *, is_first: bool) -> str:
        if not self._was_up:
            return "registry not reached yet: trying again"
        return "registry lost: going on with what is known" if is_first else "registry still away: trying again"


def _record(instance: Instance) -> InstanceRecord:
    is_draining = instance.state == INSTANCE_STATE_DRAINING
    return InstanceRecord(instance.instance_id, instance.address, instance.model, is_draining, instance.session_address)


def _request(record: InstanceRecord, lease_s: int) -> RegisterRequest:
    instance = Instance(
        instance_id=record.instance_id,
        address=record.address,
        model=record.model,
        state=INSTANCE_STATE_SERVING,
        session_address=record.session_address,
    )
    return RegisterRequest(instance=instance, lease=Duration(seconds=lease_s))
