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

from services.rpc.status import CHANNEL_OPTIONS
from services.runtime.backoff import Backoff
from services.runtime.log_throttle import LogThrottle
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_SERVING,
    Instance,
    RegisterRequest,
    RegisterResponse,
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
RegistryStream: TypeAlias = "Callable[[RegistryAsyncStub, Callable[[], None]], Awaitable[bool]]"
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


async def _stay_connected(addresses: Sequence[str], session: RegistryStream, what: str) -> None:
    """Run `session` on one registry after the other until it returns True."""
    rng, outage = random.Random(), _RegistryOutage(what)
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


class _RegistryOutage:
    """Counts tries, and logs the first, some, and the last of them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_out = True
        self._was_up = False
        self._reminder = LogThrottle()
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
