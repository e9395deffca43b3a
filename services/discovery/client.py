"""What both clients of the registry share: the instance record, and a connection to any one of several registries.

A client uses one registry at a time and moves to the next when it fails. While no registry answers, both clients keep
what they know and reconnect with full jitter. An outage is logged periodically, not once per try.
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

from services.rpc.secure.channels import open_channel, why_refused
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
from services.tls.peers import Peers
from services.tls.roles import Role

if TYPE_CHECKING:
    from services.stubs.registry_pb2_grpc import RegistryAsyncStub  # exists in the annotations alone

log = structlog.get_logger()

FIRST_ANSWER_TIMEOUT_S = 5.0
"""How long to wait for the first answer on a new stream before trying the next registry."""
DEREGISTER_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for the registry. Without an answer its record expires with its lease."""
BACKOFF = Backoff()

RegisterCall: TypeAlias = "grpc.aio.StreamStreamCall[RegisterRequest, RegisterResponse]"
RegistryStream: TypeAlias = "Callable[[RegistryAsyncStub, Callable[[], None]], Awaitable[bool]]"
"""Runs one stream to one registry. Calls the callback when the registry answers. Returns True to stop reconnecting."""


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """One worker.

    address: host:port of its gRPC services.
    model: name of the served model.
    is_draining: set by the registry. A worker does not report it; it deregisters.
    session_address: host:port for sessions; empty if sessions use `address`.
    """

    instance_id: str
    address: str
    model: str
    is_draining: bool = False
    session_address: str = ""

    @property
    def sessions_at(self) -> str:
        """host:port for sessions."""
        return self.session_address or self.address


OnChange: TypeAlias = "Callable[[Mapping[str, InstanceRecord], Collection[str]], None]"
"""Parameters: the instances that are new or have changed, and the ids of those that are gone."""


async def stay_connected(
    addresses: Sequence[str], stream: RegistryStream, what: str, peers: Peers | None = None
) -> None:
    """Run `stream` on one registry after another, until it returns True. `what`: the client's name in the log.

    `peers`: how to connect over TLS; None: without.
    """
    rng, outage = random.Random(), _RegistryOutage(what)
    first = rng.randrange(len(addresses))  # Spreads the clients over the registries.
    for number in itertools.count(first):
        address = addresses[number % len(addresses)]
        try:
            async with open_channel(address, peers, Role.REGISTRY) as channel:
                if await stream(RegistryStub(channel), partial(outage.end, address)):
                    return
            outage.begin(address, "the registry ended the stream")
        except TimeoutError:
            outage.begin(address, f"no answer within {FIRST_ANSWER_TIMEOUT_S:g} s")
        except grpc.aio.AioRpcError as error:
            outage.begin(address, _why(error))
        await asyncio.sleep(BACKOFF.delay_s(outage.tries, rng))


def _why(error: grpc.aio.AioRpcError) -> str:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "the server at this address is not a registry: check --registry"
    return f"{error.code().name}: {why_refused(error, Role.REGISTRY)}"


class _RegistryOutage:
    """Counts reconnects. Logs the start of an outage, periodic reminders, and its end."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_out = True
        self._was_up = False
        self._throttle = LogThrottle()
        self._up_at = 0.0
        self.tries = 0

    def end(self, address: str) -> None:
        """A registry has answered."""
        if self._is_out:
            self._is_out, self._was_up = False, True
            self._throttle.reset()
            self._up_at = asyncio.get_running_loop().time()
            log.info("registry answers", what=self._what, registry=address)

    def begin(self, address: str, why: str) -> None:
        """A stream has failed. If it had lasted longer than the back-off's cap, the back-off starts again."""
        lasted_s = 0.0 if self._is_out else asyncio.get_running_loop().time() - self._up_at
        self.tries = 0 if lasted_s > BACKOFF.cap_s else self.tries + 1
        self._is_out = True
        is_first = self._throttle.is_quiet
        if self._throttle.should_log():
            log.warning(self._event(is_first=is_first), what=self._what, registry=address, why=why)

    def _event(self, *, is_first: bool) -> str:
        if not self._was_up:
            return "registry not reached yet: trying again"
        return "registry lost: keeping the last state" if is_first else "registry still unavailable: trying again"


def record_from_wire(instance: Instance) -> InstanceRecord:
    is_draining = instance.state == INSTANCE_STATE_DRAINING
    return InstanceRecord(instance.instance_id, instance.address, instance.model, is_draining, instance.session_address)


def registration_request(record: InstanceRecord, lease_s: int) -> RegisterRequest:
    instance = Instance(
        instance_id=record.instance_id,
        address=record.address,
        model=record.model,
        state=INSTANCE_STATE_SERVING,
        session_address=record.session_address,
    )
    return RegisterRequest(instance=instance, lease=Duration(seconds=lease_s))
