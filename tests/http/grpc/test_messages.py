"""Requests of gRPC hold no more memory than their bytes, whatever they are cut into, and all of a connection share a
bound.
"""

import asyncio
import gzip
import tracemalloc
from itertools import pairwise
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from services.http.grpc.messages import MessageReader
from services.http.grpc.metadata import RpcError
from services.http.h2.wire.frames import DATA, END_STREAM, ErrorCode, frame
from services.http.server.config import HttpConfig
from services.rpc.status import MESSAGE_BYTES_MAX
from tests.http.grpc.interop_service import SERVICE
from tests.http.grpc.support import HEADERS, UNARY_CALL, message, raw_client, serving_rpcs
from tests.http.h2.support import Client, connection_of
from tests.http.support import run

INPUT_CALL = f"/{SERVICE}/StreamingInputCall"
MIB = 1024 * 1024


@given(st.lists(st.binary(max_size=40), max_size=10), st.lists(st.integers(0, 400), max_size=10))
def test_messages_are_the_same_however_their_bytes_arrive(contents: list[bytes], cuts: list[int]) -> None:
    reader = MessageReader()
    data = b"".join(message(content, flag=len(content) % 2) for content in contents)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = []
    for start, end in pairwise(bounds):
        reader.feed(data[start:end])
        while (one := reader.next()) is not None:
            found.append(one)

    assert found == [(len(content) % 2 == 1, content) for content in contents]
    assert reader.size == 0


def test_many_small_messages_take_no_more_memory_than_their_bytes() -> None:
    data = message(b"") * (MIB // 5)
    reader = MessageReader()
    tracemalloc.start()
    try:
        for at in range(0, len(data), 16_384):
            reader.feed(data[at : at + 16_384])
        assert tracemalloc.get_traced_memory()[1] < 3 * MIB
    finally:
        tracemalloc.stop()


def test_too_large_message_is_refused_before_it_has_come() -> None:
    with pytest.raises(RpcError, match="larger than"):
        MessageReader().feed(b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big"))


def test_second_message_of_a_single_request_is_refused_before_the_end() -> None:
    """Bug: it was collected, with what followed, until the end of the request."""

    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            stream_id = client.open(UNARY_CALL, HEADERS, ends=False)
            client.send(frame(DATA, 0, stream_id, message(b"") * 2))

            answer = await client.answer(stream_id)

        assert answer.headers["grpc-status"] == str(grpc.StatusCode.INTERNAL.value[0])

    run(test)


def begin_message(client: Client, size: int) -> int:
    """Send `size` bytes of a message that stays incomplete. Returns the id of the stream."""
    stream_id = client.open(INPUT_CALL, HEADERS, ends=False)
    data = b"\0" + (2 * size).to_bytes(4, "big") + bytes(size)
    client.send(*(frame(DATA, 0, stream_id, data[at : at + 16_384]) for at in range(0, len(data), 16_384)))
    return stream_id


def test_incomplete_messages_of_all_streams_together_are_bounded() -> None:
    """Bug: each of 1,024 rpcs that take several messages could hold MESSAGE_BYTES_MAX bytes of an incomplete one."""

    async def test() -> None:
        config = HttpConfig(body_bytes_max=100_000)
        async with serving_rpcs(config=config) as serving, raw_client(serving) as client:
            begin_message(client, 60_000)
            second = begin_message(client, 60_000)

            answer = await client.answer(second)

            assert answer.reset is ErrorCode.REFUSED_STREAM, "it may be sent again"
            connection = connection_of(serving.server)
            assert 60_000 <= connection.bodies_size <= 100_000
            client.writer.close()
            while connection.tasks:
                await asyncio.sleep(0.001)
            assert connection.bodies_size == 0

    run(test)


def test_messages_that_are_read_leave_the_bound() -> None:
    async def test() -> None:
        config = HttpConfig(body_bytes_max=100_000)
        async with serving_rpcs(config=config) as serving, raw_client(serving) as client:
            read: list[int] = []

            async def counts(requests: Any, context: Any) -> Any:
                async for request in requests:
                    size = len(request.payload.body)
                    read.append(size)
                return types["StreamingInputCallResponse"](aggregated_payload_size=sum(read))

            types = serving.service.types
            serving.routes.methods[INPUT_CALL].behaviour = counts
            one = message(types["StreamingInputCallRequest"](payload={"body": bytes(10_000)}).SerializeToString())
            stream_id = client.open(INPUT_CALL, HEADERS, ends=False)
            await client.until(lambda: client.seen)
            for count in range(1, 31):
                client.send(frame(DATA, 0, stream_id, one))
                while len(read) < count:
                    await asyncio.sleep(0.001)
            assert connection_of(serving.server).bodies_size == 0
            client.send(frame(DATA, END_STREAM, stream_id))

            answer = await client.answer(stream_id)

        assert types["StreamingInputCallResponse"].FromString(answer.body[5:]).aggregated_payload_size == 300_000

    run(test)


def test_many_messages_at_once_do_not_keep_the_event_loop() -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            turns = 0
            seen: list[int] = []

            async def counts(requests: Any, context: Any) -> Any:
                async for _ in requests:
                    now = turns
                    seen.append(now)
                return serving.service.types["StreamingInputCallResponse"]()

            async def tick() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            serving.routes.methods[INPUT_CALL].behaviour = counts
            ticking = asyncio.create_task(tick())
            await client.answer(client.post(INPUT_CALL, message(b"") * 1_000, HEADERS))
            ticking.cancel()

        assert len(seen) == 1_000
        assert len(set(seen)) == 1_000, "several in one iteration"

    run(test)


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_garbage_in_a_body_ends_the_rpc_with_a_status(garbage: bytes, is_compressed: bool) -> None:
    async def test() -> None:
        async with serving_rpcs() as serving, raw_client(serving) as client:
            content = message(gzip.compress(garbage, mtime=0), flag=1) if is_compressed else garbage
            headers = HEADERS | ({"grpc-encoding": "gzip"} if is_compressed else {})
            answer = await client.answer(client.post(UNARY_CALL, content, headers))

            assert "grpc-status" in answer.headers | answer.trailers
            assert connection_of(serving.server).bodies_size == 0

    run(test)
