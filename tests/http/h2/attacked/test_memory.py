"""Whatever a client does over HTTP/2, the memory of the server grows by no more than a named bound.

The server is a process of its own: what counts is its resident memory.
"""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from services.http.h2.bounds.budget import CONTROL_FRAMES_MAX, RESETS_MAX
from services.http.h2.request import HEADS_BYTES_MAX
from services.http.h2.wire.fields import literal
from services.http.h2.wire.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    ErrorCode,
    frame,
    rst_stream,
    window_update,
)
from services.http.h2.wire.header_block import BLOCK_BYTES_MAX
from services.http.h2.writer import UNSENT_BYTES_MAX
from services.rpc.status import MESSAGE_BYTES_MAX
from tests.http.grpc.interop_service import SERVICE
from tests.http.grpc.support import HEADERS as GRPC_HEADERS
from tests.http.grpc.support import UNARY_CALL
from tests.http.h2.attacked.process import MIB, Attacked, attacked
from tests.http.h2.attacked.server import BODY_BYTES_MAX, CLIENT
from tests.http.h2.support import COMPLETIONS, STREAMED, Client, connected, settings
from tests.support.doubles import run_async

SLACK_BYTES = 8 * MIB
"""What a server needs besides: buffers of reads, and what its allocator keeps."""
FRAME = 16_384
STREAMS = 300
GIB = 1024 * MIB

Play = Callable[[Client, Attacked], Awaitable[None]]


async def calmed(client: Client) -> None:
    assert await client.end() is ErrorCode.ENHANCE_YOUR_CALM


async def rapid_reset(client: Client, _: Attacked) -> None:
    for _round in range(2 * RESETS_MAX):
        client.send(rst_stream(client.post(COMPLETIONS, STREAMED), ErrorCode.CANCEL))
    await calmed(client)


def flood(one: bytes) -> Play:
    async def play(client: Client, _: Attacked) -> None:
        client.send(one * (8 * CONTROL_FRAMES_MAX))
        await calmed(client)

    return play


async def empty_data(client: Client, _: Attacked) -> None:
    stream_id = client.open(COMPLETIONS, ends=False)
    client.send(frame(DATA, 0, stream_id) * (8 * CONTROL_FRAMES_MAX))
    await calmed(client)


async def small_data(client: Client, _: Attacked) -> None:
    stream_id = client.open(COMPLETIONS, ends=False)
    client.send(frame(DATA, 0, stream_id, b" ") * (40 * CONTROL_FRAMES_MAX))
    await calmed(client)


async def windows_opened_by_one(client: Client, _: Attacked) -> None:
    """Each byte that they let through costs the server a frame."""
    stream_id = client.post(COMPLETIONS, STREAMED)
    await client.until(lambda: client.answers[stream_id].headers)
    client.send(settings(window=1), window_update(stream_id, 1) * (8 * CONTROL_FRAMES_MAX))
    await calmed(client)


async def endless_head(client: Client, _: Attacked) -> None:
    client.send(frame(HEADERS, END_STREAM, 1, client.block("/live")))
    client.send(frame(CONTINUATION, 0, 1, literal(b"x", b"y" * 4_000)) * 4_000)
    await calmed(client)


async def bomb_of_fields(client: Client, _: Attacked) -> None:
    """CVE-2016-6581: a byte for each time that a large field of the table is repeated."""
    stored = b"\x40" + literal(b"x", b"y" * 3_900)[1:]
    client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block("/live") + stored + b"\xbe" * 12_000))
    await calmed(client)


async def many_fields(client: Client, _: Attacked) -> None:
    client.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, client.block("/live") + b"\x90" * 12_000))
    await calmed(client)


async def large_heads(client: Client, _: Attacked) -> None:
    """Of requests that stay incomplete."""
    fields = b"".join([literal(b"x-%d" % number, b"y" * 1_500) for number in range(10)])
    for number in range(1_024):
        block = client.block(COMPLETIONS) + fields
        assert len(block) < FRAME
        client.send(frame(HEADERS, END_HEADERS, 1 + 2 * number, block))
        await client.writer.drain()
    await client.until(lambda: client.answers[2 * 1_023 + 1].reset is ErrorCode.REFUSED_STREAM)


async def incomplete_bodies(client: Client, _: Attacked) -> None:
    await incomplete(client, COMPLETIONS, {}, b"")


async def incomplete_messages(client: Client, _: Attacked) -> None:
    """Of rpcs that take several."""
    prefix = b"\0" + MESSAGE_BYTES_MAX.to_bytes(4, "big")
    await incomplete(client, f"/{SERVICE}/StreamingInputCall", GRPC_HEADERS, prefix)


async def incomplete(client: Client, path: str, headers: dict[str, str], first: bytes) -> None:
    refused = False
    while not refused:
        stream_id = client.open(path, headers, ends=False)
        client.send(frame(DATA, 0, stream_id, first))
        for _ in range(200 * 1024 // FRAME):
            client.send(frame(DATA, 0, stream_id, b" " * FRAME))
        ping = len([one for one in client.seen if one.kind == PING])
        client.send(frame(PING, 0, 0, bytes(8)))
        await client.until(lambda ping=ping: len([one for one in client.seen if one.kind == PING]) > ping)  # type: ignore[misc]
        refused = client.answers[stream_id].reset is ErrorCode.REFUSED_STREAM


async def many_messages(client: Client, _: Attacked) -> None:
    """Empty ones, for a handler that takes one."""
    stream_id = client.open(UNARY_CALL, GRPC_HEADERS, ends=False)
    client.send(frame(DATA, 0, stream_id, bytes(5) * (FRAME // 5)) * 12)
    answer = await client.answer(stream_id)
    assert answer.headers["grpc-status"] == "13"


async def windows_of_zero(client: Client, _: Attacked) -> None:
    client.send(settings(window=0))
    ids = [client.post(COMPLETIONS, STREAMED) for _ in range(STREAMS)]
    await client.until(lambda: all(client.answers[one].reset is not None for one in ids))
    assert {client.answers[one].reset for one in ids} == {ErrorCode.CANCEL}


async def unread_connection(client: Client, server: Attacked) -> None:
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    before = server.log.read_text().count("SLOW_CLIENT")
    for _ in range(STREAMS):
        client.post(COMPLETIONS, STREAMED)
    while server.log.read_text().count("SLOW_CLIENT") < before + STREAMS:
        await asyncio.sleep(0.01)


@cache
def gigabyte() -> bytes:
    """A gzip of 1 GiB of zeros."""
    piece, count, crc = bytes(16 * MIB), GIB // (16 * MIB), 0
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)  # It may be repeated.
    for _ in range(count):
        crc = zlib.crc32(piece, crc)
    head, end = b"\x1f\x8b\x08" + bytes(7), b"\x03\x00"
    return head + packed * count + end + crc.to_bytes(4, "little") + GIB.to_bytes(4, "little")


async def send_all(client: Client, stream_id: int, content: bytes) -> None:
    """Send the content as the windows of the server open: it needs a MiB."""
    left, at = 256 * 1024, 0
    while at < len(content):
        while left < FRAME:
            before = len(client.seen)
            await client.read()
            updates = [one for one in client.seen[before:] if one.kind == 8 and one.stream_id == stream_id]
            left += sum(int.from_bytes(one.payload, "big") for one in updates)
        client.send(frame(DATA, 0, stream_id, content[at : at + FRAME]))
        left, at = left - FRAME, at + FRAME
    client.send(frame(DATA, END_STREAM, stream_id))


async def compressed_body(client: Client, _: Attacked) -> None:
    stream_id = client.open(COMPLETIONS, {"content-encoding": "gzip"}, ends=False)
    await send_all(client, stream_id, gigabyte())
    assert (await client.answer(stream_id)).status == 413


async def compressed_message(client: Client, _: Attacked) -> None:
    content = gigabyte()
    stream_id = client.open(UNARY_CALL, GRPC_HEADERS | {"grpc-encoding": "gzip"}, ends=False)
    await send_all(client, stream_id, b"\1" + len(content).to_bytes(4, "big") + content)
    assert (await client.answer(stream_id)).headers["grpc-status"] == "8"


@dataclass(frozen=True)
class Attack:
    """What a client does, and by how much memory grows at most."""

    play: Play
    bytes_max: int = 0


ATTACKS = {
    "rapid reset": Attack(rapid_reset),
    "PING": Attack(flood(frame(PING, 0, 0, bytes(8))), UNSENT_BYTES_MAX),
    "SETTINGS": Attack(flood(settings()), UNSENT_BYTES_MAX),
    "PRIORITY": Attack(flood(frame(2, 0, 3, bytes(5)))),
    "unknown frames": Attack(flood(frame(0x42, 0, 0, bytes(100)))),
    "empty DATA": Attack(empty_data),
    "small DATA": Attack(small_data, BODY_BYTES_MAX),
    "windows opened by 1": Attack(windows_opened_by_one, CLIENT.buffer_bytes_max),
    "CONTINUATION": Attack(endless_head, BLOCK_BYTES_MAX),
    "HPACK bomb": Attack(bomb_of_fields, BLOCK_BYTES_MAX),
    "many fields": Attack(many_fields, BLOCK_BYTES_MAX),
    "large heads": Attack(large_heads, HEADS_BYTES_MAX),
    "incomplete bodies": Attack(incomplete_bodies, BODY_BYTES_MAX),
    "incomplete messages": Attack(incomplete_messages, BODY_BYTES_MAX),
    "many messages": Attack(many_messages),
    "windows of zero": Attack(windows_of_zero, CLIENT.connection_bytes_max),
    "unread connection": Attack(unread_connection, CLIENT.connection_bytes_max),
    "compressed gigabyte over HTTP": Attack(compressed_body),
    "compressed gigabyte over gRPC": Attack(compressed_message),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(tmp_path_factory.mktemp("attacked")) as process:
        run_async(is_served(process))  # Code that runs for the first time takes memory, too.
        yield process


async def is_served(server: Attacked) -> None:
    """Another client has its answers."""
    async with connected(server.server) as client:
        assert (await client.answer(client.get("/live"))).status == 200
        stream_id = client.post(COMPLETIONS, STREAMED)
        await client.until(lambda: client.answers[stream_id].body)


@pytest.mark.parametrize("name", ATTACKS)
def test_memory_grows_by_no_more_than_its_bound(name: str, server: Attacked) -> None:
    attack = ATTACKS[name]
    gigabyte()  # Meanwhile, a connection would be silent.

    async def test() -> None:
        before = server.forget_peak()
        async with connected(server.server) as client:
            await attack.play(client, server)
        grown = server.peak - before
        print(f"{name}: {grown / MIB:.1f} MiB of {attack.bytes_max / MIB:.1f}")
        assert grown <= attack.bytes_max + SLACK_BYTES
        await is_served(server)

    run_async(test())
    assert "Traceback" not in server.log.read_text()
    assert "[error" not in server.log.read_text()
