"""rpc_server: gRPC on the port that it was given, or an error that says what to change."""

import asyncio
from typing import Any

import grpc
import pytest

from services.http.grpc.routes import GrpcRoutes
from services.http.rpc_server import rpc_server
from services.runtime.process import StartupError
from tests.http.rpcs import serving_at
from tests.support.doubles import run_async


def test_port_0_takes_a_free_port_and_returns_it() -> None:
    async def scenario() -> tuple[str, str]:
        async with serving_at() as first, serving_at() as second:
            return first, second

    first, second = run_async(scenario())

    assert first.startswith("127.0.0.1:")
    assert first != second


def test_port_in_use_is_reported_in_one_sentence_with_the_option() -> None:
    async def scenario() -> None:
        async with serving_at() as address, rpc_server(GrpcRoutes(), address):
            pass

    said = r"^cannot listen for gRPC on 127\.0\.0\.1:\d+: the port is in use; stop .*, or give another --listen$"
    with pytest.raises(StartupError, match=said):
        run_async(scenario())


def test_exit_closes_the_port() -> None:
    async def scenario() -> None:
        async with serving_at() as address:
            pass
        async with rpc_server(GrpcRoutes(), address) as another:
            assert another.addresses == [address]

    run_async(scenario())


def test_request_that_is_not_grpc_has_no_route() -> None:
    async def scenario() -> bytes:
        async with serving_at() as address:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            line = await reader.readline()
            writer.close()
            return line

    assert run_async(scenario()).startswith(b"HTTP/1.1 404")


def test_unknown_service_is_unimplemented() -> None:
    async def scenario() -> grpc.StatusCode:
        async with serving_at() as address, grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary("/no/Such")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
        return caught.value.code()

    assert run_async(scenario()) is grpc.StatusCode.UNIMPLEMENTED
