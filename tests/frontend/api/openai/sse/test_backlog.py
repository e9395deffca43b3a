"""A client that reads slowly gets the same answer in larger events; one that does not read is disconnected in time."""

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Call, Cause
from services.core.errors import Reason
from services.core.flow.client_flow import ClientBounds
from services.core.flow.delta_buffer import PIECE_BYTES_MAX
from services.core.interface import Delta, Finish, TokenLogprobs, Usage
from services.core.request import FinishReason, Request
from services.http.h1.exchange import HIGH_WATER_BYTES
from services.http.server.config import HttpConfig
from tests.http.support import HANG, Script, deaf_client, raw_post, run, serving

COMPLETION = {"model": "org/tiny", "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
COMPLETIONS = "/v1/completions"
ROOMY = 2**30
TEXT = "all work and no play "


class DeliversAhead:
    """A pipeline that delivers until too much is unsent, then `more` deltas; after `go` it delivers once more and ends.

    It checks the sink for that, since the size of the kernel's buffer is unknown.
    """

    def __init__(self, more: int = 0, *, choices: int = 1, logprobs: bool = False) -> None:
        self._more = more
        self._choices = choices
        self._logprobs = [TokenLogprobs(-1.0, ((98, -2.0),))] * len(TEXT) if logprobs else None
        self.positions = [0] * choices
        self.calls: list[Call] = []
        self.is_ahead = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, request: Request, call: Call, sink: Any) -> Finish:
        self.calls.append(call)
        try:
            while sink._backlog is None or sink._backlog.is_caught_up:
                self._say(sink, TEXT * (500 if self._logprobs is None else 1))
                await asyncio.sleep(0)
            for _ in range(self._more):
                self._say(sink)
            self.is_ahead.set()
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self._say(sink)
        return self._finish(sink)

    def _say(self, sink: Any, text: str = TEXT) -> None:
        for choice in range(self._choices):
            tokens = list(text.encode()) if self._logprobs is not None else [7] * len(text)
            sink.deliver(Delta(self.positions[choice], tokens, text, choice, self._logprobs))
            self.positions[choice] += len(text)

    def _finish(self, sink: Any) -> Finish:
        usage = Usage(3, sum(self.positions))
        for choice, position in enumerate(self.positions):
            given = usage if choice == self._choices - 1 else None
            sink.deliver(Delta(position, (), "", choice, finish_reason=FinishReason.STOP, usage=given))
        return Finish(FinishReason.STOP, usage)


class Reader:
    """Reads the stream of a client that has not read before."""

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._rest = b""
        self.events: list[Any] = []
        self.read_count = 0

    async def read(self, size: int = 1 << 20) -> bytes:
        """Some bytes; empty at the end."""
        data = b""
        with suppress(ConnectionResetError):
            data = await asyncio.get_running_loop().sock_recv(self._client, size)
        self.read_count += len(data)
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        self.events += [json.loads(block.rpartition(b"data: ")[2]) for block in blocks if not block.endswith(b"[DONE]")]
        return data

    async def read_until(self, condition: Callable[[list[Any]], bool]) -> list[Any]:
        """The events so far, once they satisfy the condition; without the end marker."""
        while not condition(self.events):
            assert await self.read()
        return self.events

    async def read_text(self, length: int) -> None:
        """The events, once they have `length` characters of text."""
        while length:
            before = len(self.events)
            assert await self.read()
            length -= len(text_of(self.events[before:]))


def post(**fields: Any) -> bytes:
    """A request whose answer has no chunks, so that the events are easy to read."""
    return raw_post(COMPLETIONS, COMPLETION | fields, version="1.0")


def text_of(events: list[Any], choice: int = 0) -> str:
    return "".join(one["text"] for event in events for one in event["choices"] if one["index"] == choice)


def has_usage(events: list[Any]) -> bool:
    return bool(events) and events[-1]["usage"] is not None


def config(**bounds: Any) -> HttpConfig:
    return HttpConfig(client=ClientBounds(**({"buffer_bytes_max": ROOMY} | bounds)))


async def is_cut(client: socket.socket) -> bool:
    """Whether the bytes that a client can still read are an incomplete answer."""
    last = b""
    with suppress(ConnectionResetError):
        while data := await asyncio.get_running_loop().sock_recv(client, 1 << 20):
            last = (last + data)[-100:]
    return b"[DONE]" not in last


async def wait_for(seconds: float) -> None:
    """Let real time pass, which the bounds measure."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, passed.set)
    await passed.wait()


# Clients that read slowly


def test_client_that_reads_again_gets_the_whole_answer_in_larger_events() -> None:
    async def test() -> None:
        pipeline = DeliversAhead(more=30_000)
        async with serving(pipeline, config=config()) as server:
            with deaf_client(server, post()) as client:
                await pipeline.is_ahead.wait()
                pipeline.go.set()
                events = await Reader(client).read_until(has_usage)

        count = pipeline.positions[0]
        assert text_of(events) == TEXT * (count // len(TEXT))
        assert events[-1]["usage"]["completion_tokens"] == count
        assert events[-2]["choices"][0]["finish_reason"] == "stop"
        small = [event for event in events if event["choices"] and event["choices"][0]["text"] == TEXT]
        assert len(small) <= HIGH_WATER_BYTES // len(TEXT), "more single deltas were sent than fit the transport"
        assert max(len(text_of([event])) for event in events) <= PIECE_BYTES_MAX + len(TEXT)

    run(test)


def test_buffered_deltas_are_written_once_there_is_room_and_later_ones_at_once() -> None:
    """It does not wait for the next token, since an engine may be slow."""

    async def test() -> None:
        pipeline = DeliversAhead(more=30_000)
        async with serving(pipeline, config=config()) as server:
            with deaf_client(server, post()) as client:
                await pipeline.is_ahead.wait()
                reader = Reader(client)
                await reader.read_text(pipeline.positions[0])
                pipeline.go.set()
                events = await reader.read_until(has_usage)

        assert [text_of([event]) for event in events[-3:]] == [TEXT, "", ""]

    run(test)


def test_order_is_kept_when_corked_deltas_fill_the_transport() -> None:
    """The first corked delta may fill the transport. Later deltas must come after all corked ones."""
    parts = ["a" * 20_000_000, "b", "c", "d"]

    async def test() -> None:
        async def turns(request: Request, call: Call, sink: Any) -> Finish:
            cork = server.context.cork
            for one in (parts[:2], parts[2:]):
                cork.hold()
                for text in one:
                    sink.deliver(Delta(parts.index(text), [7], text))
                cork.release()
                assert not sink._is_open
            usage = Usage(3, len(parts))
            sink.deliver(Delta(len(parts), (), "", finish_reason=FinishReason.STOP, usage=usage))
            return Finish(FinishReason.STOP, usage)

        async with serving(turns, config=config()) as server:
            with deaf_client(server, post()) as client:
                events = await Reader(client).read_until(has_usage)

        assert text_of(events) == "".join(parts)

    run(test)


def test_larger_events_have_exact_choices_and_log_probabilities() -> None:
    async def test() -> None:
        pipeline = DeliversAhead(more=200, choices=2, logprobs=True)
        async with serving(pipeline, config=config()) as server:
            with deaf_client(server, post(n=2, logprobs=1)) as client:
                await pipeline.is_ahead.wait()
                pipeline.go.set()
                events = await Reader(client).read_until(has_usage)

        for choice, count in enumerate(pipeline.positions):
            assert text_of(events, choice) == TEXT * (count // len(TEXT))
            sent = [one for event in events for one in event["choices"] if one["index"] == choice]
            written = [one["logprobs"] for one in sent if one["logprobs"] is not None]
            assert [offset for one in written for offset in one["text_offset"]] == list(range(count))
            assert "".join(token for one in written for token in one["tokens"]) == text_of(events, choice)
            assert max(len(one["tokens"]) for one in written) > len(TEXT)
            assert [one["finish_reason"] for one in sent][-1] == "stop"

    run(test)


# Clients that do not read


@pytest.mark.parametrize("more", [0, 30_000], ids=["just behind", "far behind"])
def test_client_that_reads_nothing_is_disconnected_without_a_further_token(more: int) -> None:
    async def test() -> None:
        pipeline = DeliversAhead(more)
        async with serving(pipeline, config=config(stall_s_max=0.1)) as server:
            with deaf_client(server, post()) as client:
                await pipeline.cancelled.wait()
                assert pipeline.calls[0].ending.cause is Cause.SLOW_CLIENT
                assert await is_cut(client)

        assert server.outcomes.seen == [Reason.SLOW_CLIENT]

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def test_client_is_slow_from_the_token_that_is_too_much() -> None:
    """Bug: it counted as slow by the next token, and until then neither bound applied."""

    async def test() -> None:
        script = Script("x" * 20_000_000, HANG)
        async with serving(script, config=config(stall_s_max=0.1)) as server:
            with deaf_client(server, post()):
                await script.cancelled.wait()

        assert server.outcomes.seen == [Reason.SLOW_CLIENT]

    run(test)


def test_bound_counts_buffered_deltas_and_the_transport() -> None:
    async def test() -> None:
        held = (400_000 - HIGH_WATER_BYTES) // (len(TEXT) * 5)  # A byte of text and four of a token id for each.
        for more, is_cut in ((held // 2, False), (held * 2, True)):
            pipeline = DeliversAhead(more)
            async with serving(pipeline, config=config(buffer_bytes_max=400_000)) as server:
                with deaf_client(server, post()):
                    await pipeline.is_ahead.wait()
                    assert (pipeline.calls[0].ending.cause is Cause.SLOW_CLIENT) == is_cut

    run(test)


def test_client_that_reads_a_little_all_the_time_is_not_disconnected() -> None:
    """Bug: the kernel accepts more only in large steps, so such a client looked like one that does not read."""

    async def test() -> None:
        pipeline = DeliversAhead(more=30_000)
        async with serving(pipeline, config=config(stall_s_max=0.5)) as server:
            with deaf_client(server, post()) as client:
                reader, loop = Reader(client), asyncio.get_running_loop()
                await pipeline.is_ahead.wait()
                unsent, began = pipeline.positions[0], loop.time()
                while loop.time() < began + 1.2:
                    assert await reader.read(20_000)
                    await wait_for(0.01)
                assert pipeline.calls[0].ending.cause is None
                assert reader.read_count < unsent, "the client was not slow"
                pipeline.go.set()
                await reader.read_until(has_usage)

    run(test)


def test_client_that_waits_for_the_engine_does_not_stall() -> None:
    async def test() -> None:
        pipeline = DeliversAhead()
        async with serving(pipeline, config=config(stall_s_max=0.04)) as server:
            with deaf_client(server, post()) as client:
                await pipeline.is_ahead.wait()
                reader = Reader(client)
                await reader.read_text(pipeline.positions[0])
                await wait_for(0.2)
                pipeline.go.set()
                await reader.read_until(has_usage)

    run(test)


def test_request_of_a_slow_client_that_disconnects_is_cancelled() -> None:
    async def test() -> None:
        pipeline = DeliversAhead(more=30_000)
        async with serving(pipeline, config=config()) as server:
            with deaf_client(server, post()) as client:
                await pipeline.is_ahead.wait()
                client.close()
                await pipeline.cancelled.wait()

        assert pipeline.calls[0].ending.cause in (None, Cause.CLIENT_DISCONNECT)

    run(test)
