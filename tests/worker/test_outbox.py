"""Outbox: all that one frontend has not been sent yet is one message, and it is counted."""

from services.core.errors import Failure, Reason
from services.core.interface import Delta
from services.core.request import FinishReason
from services.stubs import worker_pb2
from services.worker.outbox import TOKEN_BYTES, Outbox


def nobody() -> None:
    """Who only looks at what is there need not be told of it."""


def test_all_that_there_is_is_one_message() -> None:
    outbox = Outbox(nobody)
    outbox.add_tokens(1, Delta(0, [11]))
    outbox.add_tokens(2, Delta(5, (21, 22)))
    outbox.add_finish(1, FinishReason.STOP)
    outbox.set_goaway(1.0)

    message = outbox.pop_message()

    assert message.step == worker_pb2.Step(
        stream_ids=[1, 2], positions=[0, 5], token_counts=[1, 2], token_ids=[11, 21, 22]
    )
    assert [end.stream_id for end in message.ends] == [1]
    assert message.HasField("goaway")


def test_what_was_taken_is_not_there_any_more() -> None:
    outbox = Outbox(nobody)
    outbox.add_tokens(2, Delta(5, (21, 22)))
    outbox.pop_message()
    assert outbox.is_empty

    outbox.add_tokens(2, Delta(7, [23]))

    assert outbox.pop_message().step == worker_pb2.Step(stream_ids=[2], positions=[7], token_counts=[1], token_ids=[23])


def test_what_gathers_while_a_message_is_on_its_way_is_one_entry_for_each_stream() -> None:
    outbox = Outbox(nobody)
    for position in range(3):
        outbox.add_tokens(1, Delta(position, [10 + position]))
        outbox.add_tokens(2, Delta(5 + position, [20 + position]))

    assert outbox.pop_message().step == worker_pb2.Step(
        stream_ids=[1, 2], positions=[0, 5], token_counts=[3, 3], token_ids=[10, 11, 12, 20, 21, 22]
    )


def test_whoever_sends_is_told_of_each_change() -> None:
    told: list[int] = []
    outbox = Outbox(lambda: told.append(outbox.token_count))

    outbox.add_begun(1)
    outbox.add_tokens(1, Delta(0, [11, 12]))
    outbox.set_load(worker_pb2.Load(running=1))
    outbox.pop_message()
    outbox.set_goaway(1.0)

    assert told == [1, 3, 3, 0]


def test_ends_count_by_their_length() -> None:
    """Once 200,000 refused requests lay unread and the session went on."""
    outbox = Outbox(nobody)

    outbox.add_failure(1, Failure(Reason.DRAINING, "x" * 200))

    assert outbox.token_count >= 200 / TOKEN_BYTES


def test_streams_that_begin_count() -> None:
    """Of those that are cancelled there is nothing else to send: once they filled the memory beside it."""
    outbox = Outbox(nobody)

    for stream_id in range(4):
        outbox.add_begun(stream_id)

    assert outbox.token_count == 4
