"""Contract of the channels by which processes call each other: the simulation's double behaves as grpcio's.

Each test runs with both, against the server of the product on real sockets.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from services.core.errors import Failure, Reason
from services.rpc.context import Context
from services.rpc.status import CHANNEL_OPTIONS
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import (
    DrainRequest,
    DrainResponse,
    Instance,
    ListRequest,
    ListResponse,
    RegisterRequest,
    RegisterResponse,
    WatchRequest,
    WatchResponse,
)
from services.stubs.registry_pb2_grpc import RegistryServicer, RegistryStub, add_RegistryServicer_to_server
from simulation.grpc.channel import Channel
from tests.http.rpcs import serving_at
from tests.registry.support import free_port, until
from tests.support.clock import WAIT_S

CHANNELS: dict[str, Callable[..., Any]] = {"grpcio": grpc.aio.insecure_channel, "double": Channel}
MANY, LARGE = 300, 65_536
"""Messages, and the size of each, that are more together than any window has room for."""


class Server(RegistryServicer):
    """Answers as the requests say. `left`: the rpcs that were cancelled. `sent`: messages of the last stream."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.sent = 0

    async def List(self, _request: ListRequest, _context: object) -> ListResponse:  # noqa: N802
        return ListResponse(revision=7)

    async def Drain(self, _request: DrainRequest, _context: object) -> DrainResponse:  # noqa: N802
        raise AssertionError("no test calls it")

    async def Watch(self, request: WatchRequest, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """`epoch`: what becomes of it after `revision` messages."""
        try:
            for number in range(request.revision):
                await context.write(WatchResponse(revision=number, epoch="x" * LARGE))
                self.sent += 1
            if request.epoch == "fails":
                raise Failure(Reason.STORE_AWAY, "the store is away: ü")
            if request.epoch == "waits":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.left.append("Watch")
            raise

    async def Register(self, _requests: Any, context: Context) -> None:  # type: ignore[override]  # noqa: N802
        """Send each record back, and end after one without an id."""
        try:
            while isinstance(request := await context.read(), RegisterRequest) and request.instance.instance_id:
                await context.write(RegisterResponse(instance=request.instance))
        except asyncio.CancelledError:
            self.left.append("Register")
            raise


@asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[tuple[Server, str]]:
    server = Server()
    async with serving_at((add_RegistryServicer_to_server, server), port=port) as address:
        yield server, address


@pytest.fixture(params=CHANNELS)
def open_channel(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return lambda address: CHANNELS[request.param](address, options=CHANNEL_OPTIONS)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await body()

    run_on_loop(bounded())


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    return failed.value


def record(instance_id: str) -> RegisterRequest:
    return RegisterRequest(instance=Instance(instance_id=instance_id))


def test_unary_call_returns_its_response(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            response = await RegistryStub(channel).List(ListRequest())
            assert response == ListResponse(revision=7)

    run(body)


def test_responses_come_in_order_and_then_the_end_again_and_again(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=3))
            revisions = [(await call.read()).revision for _ in range(3)]
            assert revisions == [0, 1, 2]
            assert await call.read() is grpc.aio.EOF
            assert await call.read() is grpc.aio.EOF

    run(body)


def test_failure_follows_the_responses_before_it(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="fails"))
            assert (await call.read()).revision == 0
            failure = await failure_of(call)
            assert (failure.code(), failure.details()) == (grpc.StatusCode.UNAVAILABLE, "the store is away: ü")

    run(body)


def test_both_sides_of_a_stream_send(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            call = RegistryStub(channel).Register()
            for name in ("a", "b"):
                await call.write(record(name))
                assert (await call.read()).instance.instance_id == name
            await call.write(record(""))
            assert await call.read() is grpc.aio.EOF

    run(body)


def test_write_after_the_end_is_an_invalid_state(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            call = RegistryStub(channel).Register()
            await call.write(record(""))
            assert await call.read() is grpc.aio.EOF
            with pytest.raises(asyncio.InvalidStateError):
                await call.write(record("a"))

    run(body)


def test_reader_that_does_not_read_holds_up_the_server(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (server, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=MANY))
            assert (await call.read()).revision == 0
            await until(lambda: server.sent > 1)
            before = server.sent
            for _ in range(MANY - 1):
                await call.read()
            assert await call.read() is grpc.aio.EOF
            assert before < MANY
            assert server.sent == MANY

    run(body)


def test_cancel_reaches_the_handler(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (server, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="waits"))
            await call.read()
            call.cancel()
            await until(lambda: server.left == ["Watch"])

    run(body)


def test_end_of_the_channel_cancels_its_calls(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (server, address):
            async with open_channel(address) as channel:
                watch = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="waits"))
                await watch.read()
                register = RegistryStub(channel).Register()
                await register.write(record("a"))
                await register.read()
            await until(lambda: sorted(server.left) == ["Register", "Watch"])

    run(body)


def test_reader_that_is_cancelled_cancels_its_call(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (server, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="waits"))
            await call.read()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await call.read()
            await until(lambda: server.left == ["Watch"])

    run(body)


def test_nobody_at_the_address_is_unavailable(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with open_channel(f"127.0.0.1:{free_port()}") as channel:
            failure = await failure_of(RegistryStub(channel).Watch(WatchRequest()))
            assert failure.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError):
                await RegistryStub(channel).Register().write(record("a"))

    run(body)


def test_server_that_ends_makes_its_streams_unavailable(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (_, address):
            channel = open_channel(address)
            call = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="waits"))
            await call.read()
        failure = await failure_of(call)
        assert failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        await channel.__aexit__(None, None, None)

    run(body)


def test_timeout_ends_the_call(open_channel: Callable[[str], Any]) -> None:
    async def body() -> None:
        async with serving() as (server, address), open_channel(address) as channel:
            call = RegistryStub(channel).Watch(WatchRequest(revision=1, epoch="waits"), timeout=0.2)
            await call.read()
            assert (await failure_of(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: server.left == ["Watch"])

    run(body)


def test_metadata_of_a_failure_is_read_from_its_details(open_channel: Callable[[str], Any]) -> None:
    """`services/rpc/status.py` reads the reason of a failure from its trailers."""
    from services.rpc.status import failure_of as translated

    async def body() -> None:
        async with serving() as (_, address), open_channel(address) as channel:
            error = await failure_of(RegistryStub(channel).Watch(WatchRequest(epoch="fails")))
            assert translated(error, otherwise=Reason.CANNOT_CONNECT).reason is Reason.STORE_AWAY

    run(body)
