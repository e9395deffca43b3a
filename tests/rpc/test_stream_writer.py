"""StreamWriter: a client may read slowly; one that does not read is ended in bounded time and memory, with a reason."""

import asyncio
from typing import Any

import pytest

from services.core.call import Call, Cause
from services.core.common_layers import Guard
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.flow.delta_buffer import PIECE_BYTES_MAX, TOKEN_BYTES
from services.core.generation.kept import Kept
from services.core.interface import Delta, Finish, Layer, Sink
from services.core.request import Request
from services.rpc.inference_service import InferenceService
from services.rpc.stream_writer import StreamWriter
from tests.support.doubles import make_kept, make_request, run_async
from tests.support.inference import ANSWER, SteppedPipeline, error_info, generate_request, read_all, serving

MORE_THAN_A_WINDOW = 12_000_000
"""Bytes. A message of this size cannot be sent to a client that does not read."""
ROOMY = 2**30


class Flood:
    """A pipeline that delivers 1,000 tokens at a time without end, whether or not the client reads."""

    def __init__(self) -> None:
        self.delivered_count = 0
        self.cancelled = asyncio.Event()
        self.calls: list[Call] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.calls.append(call)
        try:
            while True:
                sink.deliver(Delta(self.delivered_count, [100_000] * 1000))
                self.delivered_count += 1000
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()


class Burst:
    """A pipeline that delivers more than a flow-control window at once and then ends, by itself or by its sink.

    No message is so large that it has to be cut, so a client that does not read is told the reason.
    """

    def __init__(
        self, outcome: Finish | Exception | None = ANSWER, *, size: int = MORE_THAN_A_WINDOW, pieces: int = 500
    ) -> None:
        """`outcome`: None waits for ever. `size`: in bytes. `pieces`: the number of deltas."""
        self._outcome = outcome
        self._pieces = pieces
        self._text = "x" * (size // pieces)
        self.calls: list[Call] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.calls.append(call)
        for position in range(self._pieces):
            sink.deliver(Delta(position, [7], self._text))
        await asyncio.sleep(0)
        sink.deliver(Delta(self._pieces, [7]))
        if self._outcome is None:
            await asyncio.Event().wait()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome


class Unread:
    """The context of a client that has left before the head is sent. Notes whether it counted as told of its answer."""

    has_room = True
    on_evicted = None

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.was_told = False

    def hold(self, size: int) -> None:
        """This context counts nothing."""

    def send_head(self, metadata: Any) -> None:
        self.was_told = self._kept.generation.is_told
        raise asyncio.CancelledError


class Noting(InferenceService):
    """Tells when a handler has ended."""

    ended: asyncio.Event

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        try:
            await super().Generate(request, context)
        finally:
            self.ended.set()


# The bound in bytes


@pytest.mark.parametrize(("tokens", "is_over"), [(4, False), (5, True)])
def test_client_may_leave_exactly_the_bound_unread(tokens: int, is_over: bool) -> None:
    calls: list[Call] = []

    async def pipeline(request: Request, call: Call, sink: Sink) -> Finish:
        calls.append(call)
        sink.deliver(Delta(0, [7], "x" * MORE_THAN_A_WINDOW))  # What follows waits.
        for position in range(1, tokens + 1):  # At once, so that none is written in between.
            sink.deliver(Delta(position, [7], "x"))
        return ANSWER

    async def scenario() -> None:
        async with serving(pipeline, ClientBounds(buffer_bytes_max=4 * (TOKEN_BYTES + 1))) as stub:
            await read_all(stub.Generate(generate_request()))

    run_async(scenario())
    (call,) = calls

    assert (call.ending.cause is Cause.SLOW_CLIENT) == is_over
    assert call.ending.failure is None or call.ending.failure.reason is Reason.SLOW_CLIENT


def test_client_that_does_not_read_is_ended_at_the_bound_while_a_write_waits() -> None:
    """A bug: the bound was checked only between writes, so a client that read nothing filled the memory."""

    async def scenario() -> Any:
        flood = Flood()
        async with serving(flood, ClientBounds(buffer_bytes_max=500_000)) as stub:
            call = stub.Generate(generate_request())
            await call.read()
            await flood.cancelled.wait()
            items, error = await read_all(call)
            assert items[-1].delta.position + len(items[-1].delta.token_ids) == flood.delivered_count
            assert max(item.ByteSize() for item in items) < PIECE_BYTES_MAX + 6 * 1000
            assert flood.calls[0].ending.cause is Cause.SLOW_CLIENT
            return error

    assert error_info(run_async(scenario())).reason == "SLOW_CLIENT"


# The end of an answer


@pytest.mark.parametrize(
    ("pipeline", "buffer_bytes_max"),
    [
        (Burst(), ROOMY),
        (Burst(Failure(Reason.DISCONNECTED, "lost")), ROOMY),
        (Guard(Burst(ValueError("a bug"))), ROOMY),
        (Burst(outcome=None), 1_000_000),
    ],
    ids=["that ended well", "that failed", "with a bug", "that it made too long"],
)
@pytest.mark.parametrize("bounds", [{"drain_s_max": 0.1}, {"stall_s_max": 0.1}], ids=["in time", "at all"])
def test_client_that_never_reads_the_end_of_an_answer_is_ended(
    pipeline: Layer,
    buffer_bytes_max: int,
    bounds: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bug: its handler, its buffer and the shutdown of the process waited for it for ever."""

    async def scenario() -> tuple[str, list[str]]:
        Noting.ended = asyncio.Event()
        given = ClientBounds(buffer_bytes_max=buffer_bytes_max, **bounds)
        async with serving(pipeline, given, Noting) as stub:
            call = stub.Generate(generate_request())
            await Noting.ended.wait()
            _, error = await read_all(call)  # One that reads after all is told.
            errors = [record.message for record in caplog.records if record.name.startswith("grpc")]
            return error_info(error).reason, errors

    assert run_async(scenario()) == ("SLOW_CLIENT", [])


# A client that takes nothing


def test_client_that_reads_nothing_is_ended_even_if_no_further_token_comes() -> None:
    async def scenario() -> tuple[Call, Any]:
        Noting.ended = asyncio.Event()
        pipeline = Burst(outcome=None)
        async with serving(pipeline, ClientBounds(buffer_bytes_max=ROOMY, stall_s_max=0.1), Noting) as stub:
            call = stub.Generate(generate_request())
            await Noting.ended.wait()
            return pipeline.calls[0], (await read_all(call))[1]

    call, error = run_async(scenario())

    assert call.ending.cause is Cause.SLOW_CLIENT
    assert "has read nothing for 0.1 s" in error.details()


def test_client_that_reads_slowly_but_steadily_gets_everything() -> None:
    """Messages have a bounded size, so that each window that the client reads counts as progress."""
    small_window = [("grpc.http2.bdp_probe", 0)]
    bounds = ClientBounds(buffer_bytes_max=ROOMY, stall_s_max=0.3)

    async def scenario() -> tuple[str, Any, float]:
        loop = asyncio.get_running_loop()
        async with serving(Burst(pieces=500, size=2_000_000), bounds, options=small_window) as stub:
            call, began = stub.Generate(generate_request()), loop.time()
            text = ""
            while (item := await call.read()) and item.HasField("delta"):
                text += item.delta.text
                await asyncio.sleep(0.01)  # Its pace, which is what this is about.
            return text, item, loop.time() - began

    text, last, took_s = run_async(scenario())

    assert text == "x" * 2_000_000
    assert last.complete_final
    assert took_s > 3 * bounds.stall_s_max, "else it was not slow"


def test_client_that_waits_for_the_engine_does_not_count_as_stalled() -> None:
    bounds = ClientBounds(stall_s_max=0.5)  # A write takes its time, too.

    async def scenario() -> Any:
        pipeline = SteppedPipeline([7], [8])
        async with serving(pipeline, bounds) as stub:
            call = stub.Generate(generate_request())
            pipeline.go.release()
            await call.read()
            loop = asyncio.get_running_loop()
            waited = asyncio.Event()
            loop.call_later(2 * bounds.stall_s_max, waited.set)
            await waited.wait()
            pipeline.go.release()
            pipeline.go.release()
            return await read_all(call)

    items, error = run_async(scenario())

    assert error is None
    assert items[-1].complete_final


def test_client_that_hangs_up_during_a_write_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[str]:
        Noting.ended = asyncio.Event()
        pipeline = Burst(outcome=None)
        async with serving(pipeline, ClientBounds(buffer_bytes_max=ROOMY), Noting) as stub:
            call = stub.Generate(generate_request())
            await call.initial_metadata()
            call.cancel()
            await Noting.ended.wait()
            assert pipeline.calls[0].ending.cause is None
            return [record.message for record in caplog.records if record.name.startswith("grpc")]

    assert run_async(scenario()) == []


def test_client_counts_as_told_of_its_answer_before_the_id_is_sent() -> None:
    """A bug: it may have the id and leave while the call waits. Its answer was ended, as one that nobody knows."""

    async def scenario() -> bool:
        kept = make_kept(is_told=False)
        client = Unread(kept)
        context: Any = client
        writer = StreamWriter(Call(request_id="r", kept=kept), context, ClientBounds())
        with pytest.raises(asyncio.CancelledError):
            await writer.run(Burst(size=10, pieces=1), make_request())
        return client.was_told

    assert run_async(scenario())
