"""Stream: every item that a worker sends for a request is validated before its client sees it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from services.core.call import Attempt
from services.core.errors import Failure, Reason
from services.core.interface import Delta, Finish, TokenLogprobs
from services.core.request import FinishReason
from services.frontend.session.stream import Stream
from services.models.tokenizers.byte_level import VOCAB_SIZE
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP, FINISH_REASON_UNSPECIFIED
from services.stubs.inference_pb2 import FinishReason as WireReason
from tests.support.doubles import Collected, make_request, run_async


def end(
    reason: WireReason = FINISH_REASON_UNSPECIFIED, *, final: bool = False, error: str = ""
) -> worker_pb2.StreamEnd:
    message = worker_pb2.StreamEnd(stream_id=1, finish_reason=reason, complete_final=final)
    if error:
        message.error.reason = error
    return message


def play(*items: Callable[[Stream], None], **request: Any) -> tuple[Collected, Finish | Failure | None]:
    """Feed a stream. Returns what its sink got, and how it ended (None: not yet)."""

    async def scenario() -> tuple[Collected, Finish | Failure | None]:
        collected = Collected()
        stream = Stream(1, make_request(**request), VOCAB_SIZE, asyncio.get_running_loop().create_future())
        stream.join(Attempt(), collected)
        for item in items:
            item(stream)
        if not stream.ended.done():
            return collected, None
        error = stream.ended.exception()
        return collected, error if isinstance(error, Failure) else stream.ended.result()

    return run_async(scenario())


def tokens(position: int, *token_ids: int) -> Callable[[Stream], None]:
    return lambda stream: stream.on_tokens(position, token_ids)


def ends(*args: Any, **kwargs: Any) -> Callable[[Stream], None]:
    return lambda stream: stream.on_end(end(*args, **kwargs))


def lost(stream: Stream) -> None:
    stream.fail(Failure(Reason.DISCONNECTED, "gone"))


def test_stream_delivers_tokens_in_order_and_finishes() -> None:
    collected, outcome = play(tokens(0, 7), tokens(1, 8, 9), ends(FINISH_REASON_STOP, final=True))

    assert collected.token_ids == [7, 8, 9]
    assert outcome == Finish(FinishReason.STOP)


def test_continued_request_starts_after_its_generated_tokens() -> None:
    collected, _ = play(tokens(2, 7), generated_token_ids=(5, 6))

    assert collected.token_ids == [7]


@pytest.mark.parametrize(
    "items",
    [
        [tokens(1, 7)],
        [tokens(0, 7), tokens(0, 7)],
        [tokens(0, 7), tokens(2, 8)],
        [tokens(0)],
        [tokens(0, 7, VOCAB_SIZE)],
        [ends(FINISH_REASON_STOP), tokens(0, 7)],
        [ends(FINISH_REASON_STOP), ends(FINISH_REASON_STOP, final=True)],
        [ends()],
        [ends(99)],
    ],
    ids=[
        "a gap at the start",
        "a repeat",
        "a gap",
        "no tokens",
        "a token that the model lacks",
        "tokens after the finish",
        "a second finish",
        "an empty end",
        "an unknown finish reason",
    ],
)
def test_item_that_breaks_the_rules_is_a_violation(items: list[Callable[[Stream], None]]) -> None:
    with pytest.raises(Failure) as caught:
        play(*items)

    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


def test_log_probabilities_are_delivered_with_their_tokens() -> None:
    pair = [TokenLogprobs(-0.5), TokenLogprobs(-0.25, ((8, -0.25),))]

    collected, _ = play(lambda stream: stream.on_tokens(0, [7, 8], pair), logprobs=1)

    assert collected.deltas[0].logprobs == pair


@pytest.mark.parametrize("logprobs", [None, [TokenLogprobs(-0.5)]], ids=["none", "too few"])
def test_tokens_without_requested_log_probabilities_are_a_violation(
    logprobs: list[TokenLogprobs] | None,
) -> None:
    with pytest.raises(Failure) as caught:
        play(lambda stream: stream.on_tokens(0, [7, 8], logprobs), logprobs=1)

    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


def test_stream_with_a_finish_reason_ends_well_even_if_it_is_lost() -> None:
    assert play(ends(FINISH_REASON_STOP))[1] is None
    assert play(ends(FINISH_REASON_STOP), lost)[1] == Finish(FinishReason.STOP)
    assert play(ends(FINISH_REASON_STOP), ends(final=True))[1] == Finish(FinishReason.STOP)


def test_complete_final_without_a_finish_reason_is_an_engine_error() -> None:
    outcome = play(tokens(0, 7), ends(final=True))[1]

    assert isinstance(outcome, Failure)
    assert outcome.reason is Reason.ENGINE_ERROR


@pytest.mark.parametrize(("sent", "seen"), [("DRAINING", Reason.DRAINING), ("FROM_THE_FUTURE", Reason.ENGINE_ERROR)])
def test_stream_fails_with_the_reason_that_the_worker_sends(sent: str, seen: Reason) -> None:
    outcome = play(ends(error=sent))[1]

    assert isinstance(outcome, Failure)
    assert outcome.reason is seen


def test_first_end_of_a_stream_counts() -> None:
    outcome = play(lost, ends(error="DRAINING"))[1]

    assert isinstance(outcome, Failure)
    assert outcome.reason is Reason.DISCONNECTED


def test_late_end_of_a_cancelled_request_is_ignored() -> None:
    def cancel(stream: Stream) -> None:
        stream.ended.cancel()

    with pytest.raises(asyncio.CancelledError):
        play(cancel, ends(FINISH_REASON_STOP, final=True))


def test_bug_in_a_sink_fails_its_request_alone() -> None:
    class BrokenSink:
        def deliver(self, delta: Delta) -> None:
            raise IndexError("bug")

    async def scenario() -> Failure:
        stream = Stream(1, make_request(), VOCAB_SIZE, asyncio.get_running_loop().create_future())
        stream.join(Attempt(), BrokenSink())
        stream.on_tokens(0, [7])
        with pytest.raises(Failure) as caught:
            await stream.ended
        return caught.value

    assert run_async(scenario()).reason is Reason.INTERNAL
