"""The gRPC service of the registry: Register, Watch, List and Drain on one store."""

import asyncio
import re
from typing import Any, NoReturn

from services.core.errors import Failure, Reason, invalid, quoted
from services.core.validation import NAME_FORM
from services.registry.registration import Registration, send_in_time
from services.registry.store import Store
from services.registry.watch_cache import WatchCache
from services.rpc.context import Context
from services.runtime.tasks import root_cause
from services.stubs.registry_pb2 import (
    INSTANCE_STATE_SERVING,
    INSTANCE_STATE_UNSPECIFIED,
    DrainRequest,
    DrainResponse,
    Instance,
    ListRequest,
    ListResponse,
    RegisterRequest,
    WatchRequest,
    WatchResponse,
)
from services.stubs.registry_pb2_grpc import RegistryServicer

LEASE_S_DEFAULT = 10
LEASE_S_MAX = 300
FIRST_RECORD_TIMEOUT_S = 10.0
"""How long a client may take to send the first record on a Register stream."""
MODEL_CHARACTERS_MAX = 256
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/]{1,253}):([0-9]{1,5})")


class RegistryService(RegistryServicer):
    """Serves one store. Handlers are coroutines, not generators, so that a hang-up cancels them in their own frame."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def Register(self, _requests: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        first = await _first(context)
        registration = Registration(
            self._store, checked_instance(first.instance), checked_lease_s(first), context.write
        )
        is_leaving = False
        try:
            is_leaving = await _serve(registration, context)
        finally:
            await (registration.remove() if is_leaving else registration.linger())

    async def Watch(self, request: WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        await _send_changes(self._known(), request, context)

    async def List(self, _request: ListRequest, _context: object) -> ListResponse:  # noqa: N802
        cache = self._known()
        return ListResponse(instances=cache.instances(), revision=cache.revision)

    async def Drain(self, request: DrainRequest, _context: object) -> DrainResponse:  # noqa: N802
        return DrainResponse(instance=await self._store.drain(request.instance_id))

    def _known(self) -> WatchCache:
        """What the store has. Raises STORE_AWAY if it has not been reached yet."""
        if not self._store.cache.is_known:
            raise Failure(Reason.STORE_AWAY, "the registry has not reached its store since it started")
        return self._store.cache


async def _send_changes(cache: WatchCache, request: WatchRequest, context: Context) -> NoReturn:
    """Send all changes after the revision that the watcher has seen. Raises SLOW_CLIENT."""
    first = cache.since(request.revision, request.epoch)
    last = first or WatchResponse(revision=request.revision, epoch=request.epoch)
    while True:
        await send_in_time(context.write, last)
        while (response := cache.since(last.revision, last.epoch)) is None:
            await cache.wait_change()
        last = response


async def _first(context: Context) -> RegisterRequest:
    try:
        async with asyncio.timeout(FIRST_RECORD_TIMEOUT_S):
            request = await context.read()
    except TimeoutError:
        raise invalid("instance", "the stream must begin with a record") from None
    if not isinstance(request, RegisterRequest) or not request.HasField("instance"):
        raise invalid("instance", "the stream must begin with a record")
    return request


async def _serve(registration: Registration, context: Context) -> bool:
    """Keep the record until the stream ends. Returns True if the instance deregistered."""
    context.send_head(())
    try:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(registration.run())
            is_leaving = await _read(registration, context)
            keeping.cancel()
    except BaseExceptionGroup as failures:
        raise root_cause(failures) from None
    return is_leaving


async def _read(registration: Registration, context: Context) -> bool:
    while isinstance(request := await context.read(), RegisterRequest):
        match request.WhichOneof("action"):
            case "instance":
                registration.update(checked_instance(request.instance))
            case "deregister":
                return True
            case _:
                raise invalid("action", "each message holds a record or `deregister`")
    return False


def checked_instance(instance: Instance) -> Instance:
    """Validate the record and set a missing state to SERVING. Raises Failure(INVALID_ARGUMENT)."""
    if not NAME_FORM.fullmatch(instance.instance_id):
        raise invalid("instance.instance_id", "instance_id must be 1 to 128 letters, digits, '-', '_', '.' or ':'")
    _check_address("address", instance.address)
    if instance.session_address:
        _check_address("session_address", instance.session_address)
    if not 1 <= len(instance.model) <= MODEL_CHARACTERS_MAX:
        raise invalid("instance.model", f"model must have 1 to {MODEL_CHARACTERS_MAX} characters")
    if instance.state == INSTANCE_STATE_UNSPECIFIED:
        instance.state = INSTANCE_STATE_SERVING
    return instance


def _check_address(field: str, address: str) -> None:
    match = ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise invalid(f"instance.{field}", f"{field} must be host:port, not {quoted(address)}")


def checked_lease_s(request: RegisterRequest) -> int:
    """The requested lease in seconds. Raises Failure(INVALID_ARGUMENT) unless it is whole seconds from 1 to 300."""
    if not request.HasField("lease"):
        return LEASE_S_DEFAULT
    if request.lease.nanos or not 1 <= request.lease.seconds <= LEASE_S_MAX:
        raise invalid("lease", f"lease must be whole seconds, 1 to {LEASE_S_MAX}")
    return request.lease.seconds
