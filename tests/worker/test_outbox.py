"""Outbox: everything that one frontend has not been sent yet is one message, and its size is counted."""

from services.core.errors import Failure, Reason
from services.core.interface import Delta, TokenLogprobs
from services.core.request import FinishReason
from services.rpc.step import read_entries
from services.stubs import worker_pb2
from services.worker.outbox import TOKEN_BYTES, Outbox


def ignore() -> None:
    """For tests that look only at the messages."""


def test_everything_in_the_outbox_is_one_message() -> None:
    outbox = Outbox(ignore)
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


def test_popped_message_leaves_an_empty_outbox() -> None:
    outbox = Outbox(ignore)
    outbox.add_tokens(2, Delta(5, (21, 22)))
    outbox.pop_message()
    assert outbox.is_empty

    outbox.add_tokens(2, Delta(7, [23]))

    assert outbox.pop_message().step == worker_pb2.Step(stream_ids=[2], positions=[7], token_counts=[1], token_ids=[23])


def test_tokens_that_gather_between_two_messages_are_one_entry_for_each_stream() -> None:
    outbox = Outbox(ignore)
    for position in range(3):
        outbox.add_tokens(1, Delta(position, [10 + position]))
        outbox.add_tokens(2, Delta(5 + position, [20 + position]))

    assert outbox.pop_message().step == worker_pb2.Step(
        stream_ids=[1, 2], positions=[0, 5], token_counts=[3, 3], token_ids=[10, 11, 12, 20, 21, 22]
    )


def test_each_message_has_only_the_log_probabilities_of_its_own_tokens() -> None:
    outbox, found = Outbox(ignore), []

    for position in range(2):
        outbox.add_tokens(1, Delta(position, [7], logprobs=[TokenLogprobs(-float(position))]))
        found += [logprobs for _, _, _, logprobs in read_entries(outbox.pop_message().step)]

    assert found == [[TokenLogprobs(0.0)], [TokenLogprobs(-1.0)]]


def test_each_addition_is_notified() -> None:
    counts: list[int] = []
    outbox = Outbox(lambda: counts.append(outbox.token_count))

    outbox.add_begun(1)
    outbox.add_tokens(1, Delta(0, [11, 12]))
    outbox.set_load(worker_pb2.Load(running=1))
    outbox.pop_message()
    outbox.set_goaway(1.0)

    assert counts == [1, 3, 3, 0]


def test_ends_count_by_their_size() -> None:
    """A bug: 200,000 refused requests were left unread, and the session was not dropped."""
    outbox = Outbox(ignore)

    outbox.add_failure(1, Failure(Reason.DRAINING, "x" * 200))

    assert outbox.token_count >= 200 / TOKEN_BYTES


def test_streams_that_begin_count_as_one_token() -> None:
    """A bug: for a cancelled stream nothing else is sent, and such streams filled the memory uncounted."""
    outbox = Outbox(ignore)

    for stream_id in range(4):
        outbox.add_begun(stream_id)

    assert outbox.token_count == 4
