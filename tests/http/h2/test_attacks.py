"""What costs a server something and a client nothing has a bound, and other streams hardly notice.

A well-behaved client passes none of the bounds: it has tests here, too.
"""

import asyncio
import json
from collections.abc import Callable

import grpc
import pytest

from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.http.h2 import receiving
from services.http.h2.bounds import budget
from services.http.h2.bounds.budget import CONTROL_FRAMES_MAX, RESETS_MAX
from services.http.h2.settings import STREAMS_MAX
from services.http.h2.wire.fields import literal
from services.http.h2.wire.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEADERS,
    PING,
    PRIORITY,
    ErrorCode,
    Frame,
    frame,
    headers_frames,
    rst_stream,
    window_update,
)
from services.http.h2.wire.header_block import BLOCK_BYTES_MAX, CONTINUATIONS_MAX
from services.http.h2.writer import UNSENT_BYTES_MAX
from services.http.server.config import HttpConfig
from services.http.server.turn_limits import FRAMES_A_TURN_MAX
from tests.http.grpc.support import EMPTY_CALL, error_in, raw_client, serving_rpcs
from tests.http.grpc.support import HEADERS as RPC
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED, Client, connected, connection_of, settings
from tests.http.support import HANG, Script, Server, error_of, run, serving

PRIORITY_OF_3 = frame(PRIORITY, 0, 3, bytes(5))
FLOODS: dict[str, Callable[[int], bytes]] = {
    "PING": lambda stream_id: frame(PING, 0, 0, bytes(8)),
    "SETTINGS": lambda stream_id: settings(),
    "WINDOW_UPDATE": lambda stream_id: window_update(stream_id, 1),
    "PRIORITY": lambda stream_id: PRIORITY_OF_3,
    "empty DATA": lambda stream_id: frame(DATA, 0, stream_id),
    "unknown frames": lambda stream_id: frame(0x42, 0, stream_id),
    "small DATA": lambda stream_id: frame(DATA, 0, stream_id, b" ") * 16,
}


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_of_frames_ends_the_connection(kind: str) -> None:
    async def test() -> None:
        async with serving(Script(HANG)) as server, connected(server) as client:
            stream_id = client.open(COMPLETIONS, ends=False)
            flood = FLOODS[kind](stream_id)

            client.send(flood * (4 * CONTROL_FRAMES_MAX))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_frames_that_answer_what_was_sent_are_no_flood() -> None:
    """gRPC's clients measure their line with a PING, and open two windows, for each message that they get."""

    async def test() -> None:
        parts = ["x"] * CONTROL_FRAMES_MAX
        more = [asyncio.Event() for _ in parts]
        steps = [step for pair in zip(parts, more, strict=True) for step in pair]
        async with serving(Script(*steps)) as server, connected(server) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            for event in more:
                before = len(client.answers[stream_id].body)
                while len(client.answers[stream_id].body) == before:
                    await client.read()
                client.send(frame(PING, 0, 0, bytes(8)), window_update(0, 100), window_update(stream_id, 100))
                event.set()

            answer = await client.answer(stream_id)

        assert answer.has_ended

    run(test)


async def handled_a_turn(server: Server, client: Client, data: bytes) -> list[int]:
    """How many frames are handled in each iteration of the event loop."""
    await client.until(lambda: client.seen)
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # What was handled before counts in an earlier iteration.
    connection, counts = connection_of(server), [0]
    handle = connection._frames._handle

    def count(one: Frame) -> None:
        counts[-1] += 1
        handle(one)

    connection._frames._handle = count  # type: ignore[method-assign]
    connection.data_received(data)
    while connection._frames._is_behind:
        counts.append(0)
        await asyncio.sleep(0)
    return [count for count in counts if count]


def test_frames_that_arrive_together_are_handled_some_a_turn() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            counts = await handled_a_turn(server, client, frame(PING, 0, 0, bytes(8)) * (3 * FRAMES_A_TURN_MAX))

            assert counts == [FRAMES_A_TURN_MAX] * 3
            await client.until(lambda: len([one for one in client.seen if one.kind == PING]) == 3 * FRAMES_A_TURN_MAX)

    run(test)


def test_heads_of_many_fields_are_handled_one_a_turn() -> None:
    """To decode one takes as long as to handle hundreds of other frames."""

    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            blocks = [client.block("/live", method="GET") + b"\x90" * 900 for _ in range(6)]
            flags = END_HEADERS | END_STREAM
            heads = [frame(HEADERS, flags, 1 + 2 * number, block) for number, block in enumerate(blocks)]

            assert await handled_a_turn(server, client, b"".join(heads)) == [1] * 6

            await client.until(lambda: all(client.answers[1 + 2 * number].has_ended for number in range(6)))

    run(test)


def test_window_that_is_opened_byte_by_byte_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte costs the server a frame, and would otherwise pay for the next one."""
    monkeypatch.setattr(budget, "clock", lambda: 0.0)
    monkeypatch.setattr(receiving, "CONTROL_FRAMES_MAX", 40)

    async def test() -> None:
        async with serving(Script("x" * 10_000, HANG)) as server, connected(server, window=0) as client:
            stream_id = client.post(COMPLETIONS, STREAMED)
            for size in range(1, 200):
                client.send(window_update(stream_id, 1))
                while len(client.answers[stream_id].body) < size and not client.has_ended:
                    await client.read()

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_answers_to_pings_that_nobody_reads_are_bounded() -> None:
    async def test() -> None:
        script = Script("x" * 8_000_000, HANG)
        config = HttpConfig(client=ClientBounds(buffer_bytes_max=1 << 30))
        async with serving(script, config=config) as server, connected(server) as client:
            client.post(COMPLETIONS, STREAMED)
            await script.running.wait()
            writer = connection_of(server)._writer
            while not writer.is_full:
                await asyncio.sleep(0.001)

            for _ in range(UNSENT_BYTES_MAX // 17 + CONTROL_FRAMES_MAX):
                writer.put(frame(PING, 1, 0, bytes(8)))
                writer.flush()

            assert writer.transport.is_closing()

    run(test)


# Header fields


def test_continuation_flood_ends_the_connection() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            client.send(frame(HEADERS, END_STREAM, 1, client.block("/live")))
            client.send(frame(CONTINUATION, 0, 1) * (CONTINUATIONS_MAX + 1))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_block_of_header_fields_is_bounded() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            client.send(frame(HEADERS, END_STREAM, 1, client.block("/live")))
            client.send(frame(CONTINUATION, 0, 1, literal(b"x", b"y" * 16_000)) * 9)

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_block_that_expands_beyond_its_bound_ends_the_connection() -> None:
    """A field in the dynamic table costs its sender one byte."""

    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            stored = b"\x40" + literal(b"x", b"y" * 3900)[1:]
            bomb = client.block("/live") + stored + b"\xbe" * (BLOCK_BYTES_MAX // 3900 + 1)
            client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, bomb))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_large_head_within_the_bound_is_served() -> None:
    async def test() -> None:
        async with serving(Script()) as server, connected(server) as client:
            block = client.block("/live", {"x-large": "y" * 40_000}, method="GET")
            client.send(frame(HEADERS, END_STREAM, 1, block[:16_000]), frame(CONTINUATION, 0, 1, block[16_000:32_000]))
            client.send(frame(CONTINUATION, END_HEADERS, 1, block[32_000:]))

            assert (await client.answer(1)).status == 200

    run(test)


@pytest.mark.parametrize("is_expanded", [False, True], ids=["as it is", "by the dynamic table"])
def test_head_above_its_bound_is_refused_and_the_connection_goes_on(is_expanded: bool) -> None:
    """Bug: it ended the connection, with all streams on it."""

    async def test() -> None:
        async with serving(Script("a", HANG)) as server, connected(server) as client:
            beside = client.post(COMPLETIONS, STREAMED)
            await client.until(lambda: client.answers[beside].body)
            large = "y" * 3_900
            fields = {"x-request-id": "r-1", "x-first": large, "x-last": "z"}
            if not is_expanded:
                fields |= {f"x-{number}": large for number in range(20)}
            block = client.block("/live", fields, method="GET") + (b"\xbf" * 20 if is_expanded else b"")
            stream_id, client._next_id = client._next_id, client._next_id + 2
            client.send(headers_frames(stream_id, block, is_last=True))

            refused = await client.answer(stream_id)
            assert (refused.status, refused.has_ended, refused.reset) == (431, True, None)
            assert refused.headers["x-request-id"] == "r-1"
            assert "send fewer headers" in error_of(refused.body)["message"]
            known = client.open("/live", {"x-last": "z"}, "GET", ends=True)
            assert (await client.answer(known)).status == 200, "the dynamic table is as the client knows it"
            assert client.answers[beside].reset is None

    run(test)


def test_rpc_with_a_head_above_its_bound_is_refused_with_a_reason() -> None:
    async def test() -> None:
        async with serving_rpcs() as rpcs, raw_client(rpcs) as client:
            fields = RPC | {f"x-{number}": "y" * 100 for number in range(900)}
            block = client.block(EMPTY_CALL, fields)
            assert len(block) > 4 * FRAME_BYTES_MAX
            client.send(headers_frames(1, block, is_last=True))

            refused = await client.answer(1)

        assert refused.headers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert error_in(refused.headers).reason == Reason.INVALID_ARGUMENT

    run(test)


# Streams that are reset at once


def test_rapid_reset_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487."""
    monkeypatch.setattr(budget, "clock", lambda: 0.0)  # No refill, however long the test takes.

    async def test() -> None:
        script = Script(HANG)
        async with serving(script) as server, connected(server) as client:
            for _ in range(RESETS_MAX + 200):
                client.send(rst_stream(client.post(COMPLETIONS, STREAMED), ErrorCode.CANCEL))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM
            while server.context.start_limiter._waiting:
                await asyncio.sleep(0.001)
            assert len(script.requests) < RESETS_MAX // 10, "hardly any of them has cost more than its head"

    run(test)


def test_resets_that_a_client_makes_us_send_are_bounded_likewise(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2025-8671."""
    monkeypatch.setattr(budget, "clock", lambda: 0.0)

    async def test() -> None:
        async with serving(Script(HANG)) as server, connected(server) as client:
            for _ in range(RESETS_MAX + 200):
                client.send(window_update(client.open(COMPLETIONS, ends=False), 0))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_client_that_leaves_all_its_streams_keeps_its_connection() -> None:
    async def test() -> None:
        script = Script(HANG)
        async with serving(script) as server, connected(server) as client:
            ids = [client.post(COMPLETIONS, STREAMED) for _ in range(STREAMS_MAX)]
            while len(script.requests) < STREAMS_MAX:
                await asyncio.sleep(0.001)

            client.send(*(rst_stream(one, ErrorCode.CANCEL) for one in ids))

            while connection_of(server).tasks:
                await asyncio.sleep(0.001)
            assert (await client.answer(client.get("/live"))).status == 200

    run(test)


def test_reset_stream_counts_until_its_task_has_ended() -> None:
    """Otherwise a client could have as many requests under way as it can send."""

    async def test() -> None:
        holds = asyncio.Event()

        async def clings(request: object, call: object, sink: object) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await holds.wait()

        async with serving(clings) as server, connected(server) as client:
            ids = [client.post(COMPLETIONS, STREAMED) for _ in range(STREAMS_MAX)]
            await client.until(lambda: client.seen)
            while len(connection_of(server).tasks) < STREAMS_MAX:
                await asyncio.sleep(0.001)
            client.send(*(rst_stream(one, ErrorCode.CANCEL) for one in ids))

            assert (await client.answer(client.get("/live"))).reset is ErrorCode.REFUSED_STREAM
            holds.set()
            while connection_of(server).tasks:
                await asyncio.sleep(0.001)
            assert (await client.answer(client.get("/live"))).status == 200

    run(test)


def test_setting_that_changes_many_windows_costs_more_than_one_frame() -> None:
    async def test() -> None:
        async with serving(Script(HANG)) as server, connected(server) as client:
            for _ in range(STREAMS_MAX):
                client.open(COMPLETIONS, ends=False)

            client.send((settings(window=1) + settings(window=2)) * (CONTROL_FRAMES_MAX // 64))

            assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM

    run(test)


def test_request_after_an_attack_on_another_connection_is_answered() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server) as client:
            client.send(frame(PING, 0, 0, bytes(8)) * (4 * CONTROL_FRAMES_MAX))
            async with connected(server) as other:
                answer = await other.answer(other.post(COMPLETIONS, COMPLETION))
            await client.end()

        assert json.loads(answer.body)["choices"][0]["text"] == "hello"

    run(test)
