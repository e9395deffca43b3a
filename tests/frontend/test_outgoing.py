"""Outgoing: what a session sends, joined into few messages, in an order that the worker reads right."""

from collections.abc import Sequence

import pytest

from services.errors import Failure, Reason
from services.frontend.outgoing import SUBMIT_BYTES_MAX, CancelCounts, Outgoing, submit_of
from services.request import Call
from services.stubs import worker_pb2
from tests.support import make_request, run_async


def submit(stream_id: int, prompt: Sequence[int] = (1, 2)) -> worker_pb2.Submit:
    return submit_of(stream_id, make_request(prompt), Call(request_id="r"))


def sent(outgoing: Outgoing) -> list[tuple[list[int], list[int]]]:
    """Ids of submits and cancels of each message."""
    messages = run_async(outgoing.take())
    return [([one.stream_id for one in message.submits], list(message.cancels)) for message in messages]


def test_what_comes_in_one_turn_goes_in_one_message() -> None:
    outgoing = Outgoing(CancelCounts())

    outgoing.submit(submit(1))
    outgoing.submit(submit(2))
    outgoing.cancel(1)

    assert sent(outgoing) == [([1, 2], [1])]


def test_a_request_that_may_need_the_room_of_a_cancelled_one_goes_in_a_message_after_it() -> None:
    """A bug: a worker reads the submits of a message first, and refused what its frontend knew to have room."""
    outgoing = Outgoing(CancelCounts())

    outgoing.cancel(1)
    outgoing.submit(submit(2))
    outgoing.cancel(2)

    assert sent(outgoing) == [([], [1]), ([2], [2])]


def test_each_cancel_is_counted() -> None:
    counts = CancelCounts()
    outgoing = Outgoing(counts)

    outgoing.cancel(1)
    outgoing.cancel(2)

    assert counts.signals == 2


def test_requests_that_are_too_large_together_go_one_after_the_other() -> None:
    outgoing = Outgoing(CancelCounts())
    large = range(2**28, 2**28 + SUBMIT_BYTES_MAX // 8)  # Five bytes each.

    for stream_id in (1, 2, 3):
        outgoing.submit(submit(stream_id, large))

    assert sent(outgoing) == [([1], []), ([2], []), ([3], [])]


def test_one_that_is_too_large_by_itself_is_refused() -> None:
    with pytest.raises(Failure) as caught:
        submit(1, range(2**28, 2**28 + SUBMIT_BYTES_MAX // 5))

    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_several_choices_are_one_request() -> None:
    message = submit_of(1, make_request(choice=2), Call(request_id="r"), choices=3)

    assert (message.choices, message.request.choice) == (3, 2)
