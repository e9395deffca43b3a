"""Whatever bytes a client sends, cut in whatever way: the connection ends in GOAWAY or goes on, and nothing is left.

No traceback is logged, the event loop sees no exception, and another client has its answer.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.http.h2.bounds.arrivals import Arrivals
from services.http.h2.bounds.backlogs import Backlogs
from services.http.h2.connection import H2Connection
from services.http.h2.receiving import FrameHandler
from services.http.h2.stream import Stream
from services.http.h2.wire.fields import RequestHead, encode_fields, encode_status
from services.http.h2.wire.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    ErrorCode,
    H2Error,
    frame,
    rst_stream,
    window_update,
)
from services.http.h2.writer import FrameWriter
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.turn_limits import FrameLimiter
from services.runtime.loop import Loop
from tests.http.grpc.interop_service import SERVICE, test_routes
from tests.http.grpc.support import HEADERS as GRPC_HEADERS
from tests.http.grpc.support import UNARY_CALL, message
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED, Client, connected, settings
from tests.http.support import Script, Server, serving
from tests.support.clock import WAIT_S

EXAMPLES = hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def session() -> list[bytes]:
    """The frames of a client that does a bit of everything."""
    client = Client(None, None)  # type: ignore[arg-type]  # It only encodes.
    body, ends = json.dumps(COMPLETION).encode(), END_HEADERS | END_STREAM
    return [
        settings(window=1 << 20),
        window_update(0, 1 << 20),
        frame(HEADERS, ends, 1, client.block("/live", method="GET")),
        frame(HEADERS, END_HEADERS, 3, client.block(COMPLETIONS)),
        frame(DATA, 0, 3, body[:9]),
        frame(PING, 0, 0, bytes(8)),
        frame(DATA, END_STREAM, 3, body[9:]),
        frame(HEADERS, END_HEADERS, 5, client.block(UNARY_CALL, GRPC_HEADERS)),
        frame(DATA, END_STREAM, 5, message(b"\x10\x05")),
        frame(HEADERS, END_HEADERS, 7, client.block(f"/{SERVICE}/FullDuplexCall", GRPC_HEADERS)),
        frame(DATA, 0, 7, message(b"\x12\x02\x08\x01") + message(b"")),
        frame(PRIORITY, 0, 7, bytes(5)),
        frame(HEADERS, ends, 7, client.encode([("x-checksum", "1")])),
        frame(HEADERS, END_HEADERS, 9, client.block(COMPLETIONS)),
        frame(DATA, END_STREAM, 9, json.dumps(STREAMED).encode()),
        window_update(9, 100),
        rst_stream(9, ErrorCode.CANCEL),
    ]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The session with frames that are left out, repeated, moved or changed, and with bytes that are changed."""
    frames = session()
    for _ in range(draw(st.integers(0, 3))):
        at, to = draw(st.integers(0, len(frames) - 1)), draw(st.integers(0, len(frames) - 1))
        match draw(st.sampled_from(["drop", "repeat", "move", "flags", "kind", "stream"])):
            case "drop" if len(frames) > 1:
                del frames[at]
            case "repeat":
                frames.insert(to, frames[at])
            case "move":
                frames.insert(to, frames.pop(at))
            case "flags":
                frames[at] = frames[at][:4] + bytes((draw(st.integers(0, 255)),)) + frames[at][5:]
            case "kind":
                frames[at] = frames[at][:3] + bytes((draw(st.integers(0, 10)),)) + frames[at][4:]
            case _:
                stream_id = draw(st.sampled_from([0, 1, 2, 3, 5, 7, 9, 11, 2**31 - 1]))
                frames[at] = frames[at][:5] + stream_id.to_bytes(4, "big") + frames[at][9:]
    data = bytearray(b"".join(frames))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        match draw(st.sampled_from(["change", "insert", "delete"])):
            case "change":
                data[at] = draw(st.integers(0, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=12))
            case _:
                del data[at : at + draw(st.integers(1, 12))]
    return bytes(data)


GARBAGE = st.binary(max_size=300) | st.binary(max_size=300).map(lambda data: settings() + data) | mutated()
CUTS = st.lists(st.integers(1, 900), max_size=6)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return (data[start:end] for start, end in pairwise(bounds))


# On its own


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing waits."""

    def pause_reading(self) -> None:
        """What comes is fed all the same."""

    def resume_reading(self) -> None:
        """Likewise."""


class Recorder:
    """The owner of a handler, and the receiver of each of its streams. Notes what happens."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.tasks: set[Any] = set()
        self.is_reading = self.takes_streams = True

    def on_open(self, stream: Stream, head: RequestHead) -> Any:
        self.seen.append(("open", stream.id, head))
        return _Receiver(self, stream)

    def on_closed(self, _: Stream) -> None:
        self.seen.append("closed")

    def on_pong(self, payload: bytes) -> None:
        self.seen.append(("pong", payload))

    def on_broken(self, error: H2Error) -> None:
        self.seen.append(("broken", error.code))
        self.is_reading = False


class _Receiver:
    """Answers when the request has ended, and uses what comes."""

    def __init__(self, recorder: Recorder, stream: Stream) -> None:
        self._recorder = recorder
        self._stream = stream

    def _note(self, what: str, *more: Any) -> None:
        self._recorder.seen.append((what, self._stream.id, *more))

    def on_data(self, data: bytes) -> None:
        self._note("data", data)
        self._stream.use(len(data))

    def on_end(self) -> None:
        self._note("end")
        self._stream.send_head(encode_status(200))
        self._stream.send(b"answer")
        self._stream.end(trailers=encode_fields([("grpc-status", "0")]))

    def on_late(self) -> None:
        self._note("late")

    def on_closing(self) -> None:
        self._note("closing")

    def on_reset(self) -> None:
        self._note("reset")


async def handled(parts: Iterator[bytes]) -> tuple[list[Any], bytes]:
    """What a connection makes of what it gets, and what it sends."""
    recorder, transport = Recorder(), Transport()
    writer = FrameWriter(transport, Cork(), Backlogs(1 << 20))
    handler = FrameHandler(recorder, writer, Arrivals(60.0), Arrivals(60.0), FrameLimiter())
    for part in parts:
        if recorder.is_reading:
            handler.feed(part)
        while handler._is_behind:
            await asyncio.sleep(0)
    handler.lose_streams()
    writer.flush()
    assert writer.backlogs.size == 0
    return recorder.seen, transport.written


@EXAMPLES
@given(GARBAGE, CUTS)
def test_any_cut_gives_the_same(data: bytes, cuts: list[int]) -> None:
    async def test() -> None:
        seen, written = await handled(iter([data]))

        assert await handled(pieces(data, cuts)) == (seen, written)
        assert await handled(bytes((one,)) for one in data) == (seen, written)

    asyncio.run(test())


def test_session_is_valid() -> None:
    """Otherwise all mutations of it would end at its first frame."""

    async def test() -> None:
        seen, _ = await handled(iter(session()))

        assert [event[1] for event in seen if event[0] == "end"] == [1, 3, 5, 7, 9]
        assert not [event for event in seen if event[0] == "broken"]

    asyncio.run(test())


# In a server


class Stage:
    """A server, and what must not happen to it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.connections: list[H2Connection] = []

    def is_idle(self) -> bool:
        return not self.server.clients._open and not any(one.tasks for one in self.connections)

    async def play(self, parts: Iterator[bytes]) -> None:
        """Send it all, read all answers, and see that nothing is left."""
        async with connected(self.server, greets=False) as client:
            for part in chain([PREFACE], parts):
                if not client.writer.is_closing():  # Closed: by the server's reset, and then uvloop raises.
                    client.send(part)
                await asyncio.sleep(0)
            if not client.writer.is_closing():
                client.writer.write_eof()
            await client.end()
        while not self.is_idle():
            await asyncio.sleep(0.001)
        for one in self.connections:
            assert (one.bodies_size, one.heads_size, one._writer.backlogs.size) == (0, 0, 0)
            assert not one._frames.streams
        assert not self.server.context.start_limiter._waiting
        assert not self.server.context.frame_limiter._waiting
        assert not self.server.context.cork._holds
        self.connections.clear()
        async with connected(self.server) as client:
            assert (await client.answer(client.post(COMPLETIONS, COMPLETION))).json["choices"][0]["text"] == "hello"
        while not self.is_idle():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def stage_of(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    config = HttpConfig(lingering_s_max=0.01)
    async with serving(Script("hello"), config=config, rpcs=test_routes()) as server:
        stage, made = Stage(server), H2Connection.connection_made

        def note(self: H2Connection, transport: asyncio.BaseTransport) -> None:
            stage.connections.append(self)
            made(self, transport)

        monkeypatch.setattr(H2Connection, "connection_made", note)
        yield stage


@contextmanager
def playing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Iterator[bytes]], None]]:
    """Yields what plays one session. All of them are with one server."""
    raised: list[Any] = []
    with asyncio.Runner(loop_factory=Loop) as runner, capture_logs() as logs:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: raised.append(context))
        ready: asyncio.Future[Stage] = loop.create_future()
        ended = asyncio.Event()

        async def serve() -> None:
            async with stage_of(monkeypatch) as stage:
                ready.set_result(stage)
                await ended.wait()

        async def bounded(parts: Iterator[bytes]) -> None:
            async with asyncio.timeout(WAIT_S):
                await (await ready).play(parts)

        def play(parts: Iterator[bytes]) -> None:
            runner.run(bounded(parts))
            assert not [entry for entry in logs if entry["log_level"] == "error"]
            assert raised == []
            logs.clear()

        task = loop.create_task(serve())
        yield play
        ended.set()
        loop.run_until_complete(task)


def test_any_garbage_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(monkeypatch) as play:

        @EXAMPLES
        @given(GARBAGE, CUTS)
        def check(data: bytes, cuts: list[int]) -> None:
            play(pieces(data, cuts))

        check()


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Requests whose content, of HTTP or gRPC, is garbage."""
    client, data = Client(None, None), settings()  # type: ignore[arg-type]
    for stream_id in range(1, 2 * draw(st.integers(1, 4)), 2):
        path = draw(st.sampled_from([COMPLETIONS, UNARY_CALL, f"/{SERVICE}/FullDuplexCall"]))
        encoding = draw(st.sampled_from([{}, {"grpc-encoding": "gzip", "content-encoding": "gzip"}]))
        content = draw(st.binary(max_size=100) | st.binary(max_size=60).map(message))
        headers = encoding | ({} if path == COMPLETIONS else GRPC_HEADERS)
        data += frame(HEADERS, END_HEADERS, stream_id, client.block(path, headers))
        data += frame(DATA, draw(st.sampled_from([0, END_STREAM])), stream_id, content)
    return data


def test_any_content_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(monkeypatch) as play:

        @EXAMPLES
        @given(bodies(), CUTS)
        def check(data: bytes, cuts: list[int]) -> None:
            play(pieces(data, cuts))

        check()


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Blocks of header fields that are garbage, or names and values that nobody would send."""
    data = settings()
    field = st.tuples(
        st.text(st.characters(max_codepoint=255), max_size=12) | st.sampled_from([":path", "te", "host", "cookie"]),
        st.text(st.characters(max_codepoint=255), max_size=12),
    )
    client = Client(None, None)  # type: ignore[arg-type]
    for stream_id in (1, 3):
        block = client.block("/live", method="GET") + client.encode(draw(st.lists(field, max_size=4)))
        block = draw(st.just(block) | st.binary(max_size=40) | st.binary(max_size=9).map(lambda end: block + end))  # noqa: B023
        data += frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block)
    return data


def test_any_header_fields_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(monkeypatch) as play:

        @EXAMPLES
        @given(blocks(), CUTS)
        def check(data: bytes, cuts: list[int]) -> None:
            play(pieces(data, cuts))

        check()
