"""What clients do without harm is never taken for an attack, with budgets of which only what is earned can be spent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.http.h2 import receiving
from services.http.h2.bounds import budget
from services.http.h2.wire.frames import DATA, END_STREAM, frame
from tests.http.grpc.support import Serving, serving_rpcs, stub_of
from tests.http.h2.support import COMPLETION, COMPLETIONS, connected, connection_of
from tests.http.support import Script, run, serving

SMALL = 40


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refilled by time, however long a test takes."""
    monkeypatch.setattr(budget, "clock", lambda: 0.0)
    monkeypatch.setattr(receiving, "RESETS_MAX", SMALL)
    monkeypatch.setattr(receiving, "CONTROL_FRAMES_MAX", SMALL)


@asynccontextmanager
async def one_connection(serving: Serving, stub: Any) -> AsyncIterator[None]:
    """A client that is told to be calm makes another connection, without a word to its user."""
    await stub.empty(serving.service.types["Empty"]())
    first = connection_of(serving.server)
    yield
    await stub.empty(serving.service.types["Empty"]())
    assert connection_of(serving.server) is first


def test_hedging_client_that_cancels_the_slower_of_two_rpcs() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, stub_of(serving) as stub, one_connection(serving, stub):
            empty = serving.service.types["Empty"]()
            asked = serving.service.types["StreamingOutputCallRequest"](
                response_parameters=[{"size": 1}, {"size": 10, "interval_us": 60_000_000}]
            )
            for _ in range(4 * SMALL):
                slower = stub.output(asked)
                await slower.read()
                await stub.empty(empty)
                slower.cancel()

    run(test)


def test_hundred_rpcs_at_once_and_what_grpcio_sends_for_their_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures its line with PING, and opens windows as content comes: of all streams at once."""
    monkeypatch.setattr(receiving, "CONTROL_FRAMES_MAX", 150)

    async def test() -> None:
        async with serving_rpcs() as serving, stub_of(serving) as stub, one_connection(serving, stub):
            sizes = [{"size": 3_000}] * 40
            asked = serving.service.types["StreamingOutputCallRequest"](response_parameters=sizes)

            async def read() -> int:
                return sum([len(one.payload.body) async for one in stub.output(asked)])

            assert await asyncio.gather(*(read() for _ in range(100))) == [120_000] * 100

    run(test)


def test_ping_pong_of_small_messages() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, stub_of(serving) as stub, one_connection(serving, stub):
            asked = serving.service.types["StreamingOutputCallRequest"](response_parameters=[{"size": 1}])
            call = stub.duplex()
            for _ in range(20 * SMALL):
                await call.write(asked)
                answer: Any = await call.read()
                assert answer is not grpc.aio.EOF
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

    run(test)


def test_upload_in_small_pieces() -> None:
    async def test() -> None:
        body = b'{"model": "org/tiny", "prompt": "hi"}' + b" " * 10 * SMALL
        assert COMPLETION == {"model": "org/tiny", "prompt": "hi"}
        async with serving(Script("hello")) as server, connected(server) as client:
            stream_id = client.open(COMPLETIONS, ends=False)
            client.send(*(frame(DATA, 0, stream_id, bytes((one,))) for one in body))
            client.send(frame(DATA, END_STREAM, stream_id))

            assert (await client.answer(stream_id)).status == 200

    run(test)
