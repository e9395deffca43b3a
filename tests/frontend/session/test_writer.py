"""SessionWriter: requests and cancels are gathered into few messages, in an order that leaves room for requests."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence

import pytest
from google.protobuf.message import Message

from bench.storm import memory_mib
from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.generation.kept import Generation, Kept
from services.core.interface import TokenLogprobs
from services.core.request import Continuation
from services.core.tenant import Tenant
from services.frontend.session.writer import KEEPALIVE_S, SUBMIT_BYTES_MAX, UNTAKEN_S_MAX, CancelCounts, SessionWriter
from services.rpc.codec import seconds_from_wire, tenant_from_wire
from services.rpc.framing import FrameConnection
from services.runtime.loop import Loop
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import CONTINUATION_PREFIX
from tests.support.doubles import make_request


def submit(outgoing: SessionWriter, stream_id: int, prompt: Sequence[int] = (1, 2)) -> None:
    outgoing.submit(stream_id, make_request(prompt), Call(request_id="r"))


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    """Run a writer that has no connection on an event loop."""
    with asyncio.Runner(loop_factory=Loop) as runner:
        asyncio.events._set_running_loop(runner.get_loop())
        yield
        asyncio.events._set_running_loop(None)


def sent(outgoing: SessionWriter) -> list[tuple[list[int], list[int]]]:
    """The ids of submits and cancels of each message."""
    return [([one.stream_id for one in message.submits], list(message.cancels)) for message in outgoing.pop_messages()]


def test_requests_and_cancels_of_one_turn_are_sent_in_one_message() -> None:
    outgoing = SessionWriter(CancelCounts())

    submit(outgoing, 1)
    submit(outgoing, 2)
    outgoing.cancel(1)

    assert sent(outgoing) == [([1, 2], [1])]


def test_first_message_alone_says_that_log_probabilities_are_read_in_columns() -> None:
    outgoing = SessionWriter(CancelCounts())
    submit(outgoing, 1)
    outgoing.cancel(1)
    submit(outgoing, 2)

    assert [message.reads_logprob_columns for message in outgoing.pop_messages()] == [True, False]

    submit(outgoing, 3)

    assert [message.reads_logprob_columns for message in outgoing.pop_messages()] == [False]


def test_request_after_a_cancel_is_sent_in_a_later_message() -> None:
    """A bug: a worker reads the submits of a message first, and refused a request for which a cancel made room."""
    outgoing = SessionWriter(CancelCounts())

    outgoing.cancel(1)
    submit(outgoing, 2)
    outgoing.cancel(2)

    assert sent(outgoing) == [([], [1]), ([2], [2])]


def test_request_after_a_stop_is_sent_in_a_later_message() -> None:
    """A bug: the stop frees a slot, and the worker read the request first."""
    outgoing = SessionWriter(CancelCounts())

    outgoing.stop(1)
    submit(outgoing, 2)

    first, second = outgoing.pop_messages()
    assert list(first.stops) == [1]
    assert [one.stream_id for one in second.submits] == [2]


@pytest.mark.parametrize(
    ("leave", "part"),
    [(SessionWriter.cancel, "cancels"), (SessionWriter.stop, "stops"), (SessionWriter.let_go, "detaches")],
)
def test_end_of_an_adopted_stream_is_sent_after_its_adoption(
    leave: Callable[[SessionWriter, int], None], part: str
) -> None:
    """A bug: a worker reads adoptions last, so a client that left at once left a stream that nobody ended."""
    outgoing = SessionWriter(CancelCounts())

    outgoing.adopt(1, bytes(16), 0, 2)
    leave(outgoing, 1)
    outgoing.adopt(2, bytes(16), 1, 2)
    leave(outgoing, 2)

    ended: list[list[int]] = []
    for message in outgoing.pop_messages():
        ended.append(list(getattr(message, part)))
        assert not set(ended[-1]) & {adopt.stream_id for adopt in message.adopts}
    assert ended == [[], [1], [2]]


def test_every_cancel_and_every_stop_is_counted() -> None:
    counts = CancelCounts()
    outgoing = SessionWriter(counts)

    outgoing.cancel(1)
    outgoing.cancel(2)
    outgoing.stop(3)
    outgoing.let_go(4)

    assert counts.signals == 3


def test_what_concerns_generations_is_sent_as_it_was_asked() -> None:
    outgoing = SessionWriter(CancelCounts())

    outgoing.locate(7, b"a" * 16, cancels=True)
    outgoing.adopt(1, b"b" * 16, 3, 2**40)
    (message,) = outgoing.pop_messages()

    assert message.locates == [worker_pb2.Locate(query=7, generation_id=b"a" * 16, cancels=True)]
    assert message.adopts == [worker_pb2.Adopt(stream_id=1, generation_id=b"b" * 16, index=3, epoch=2**40)]


def test_request_of_a_kept_answer_carries_its_generation() -> None:
    outgoing = SessionWriter(CancelCounts())
    generation = Generation(b"a" * 16, 12.0, is_told=True)
    generation.presentation, generation.epoch = b"how", 9
    generation.continuations = {6: Continuation.PREFIX}
    kept = Kept(generation=generation, first_index=4, base=1, prior_logprobs=[TokenLogprobs(-1.0)])

    outgoing.submit(1, make_request(choice=2, generated_token_ids=(5, 6)), Call(request_id="r", kept=kept))
    (message,) = outgoing.pop_messages()

    sent = message.submits[0].generation
    assert (sent.id, sent.index, sent.base, sent.epoch) == (b"a" * 16, 6, 1, 9)
    assert (seconds_from_wire(sent.grace), sent.presentation) == (12.0, b"how")
    assert sent.continuation == CONTINUATION_PREFIX
    assert [one.logprob for one in sent.prior_logprobs] == [-1.0]


def test_request_of_another_answer_has_no_generation() -> None:
    outgoing = SessionWriter(CancelCounts())

    submit(outgoing, 1)
    (message,) = outgoing.pop_messages()

    assert not message.submits[0].HasField("generation")


def test_request_carries_what_its_worker_needs_to_know_of_its_tenant() -> None:
    outgoing = SessionWriter(CancelCounts())
    for tenant in (Tenant(name="a", weight=2.5, queue_timeout_s=1.5), Tenant(name="b")):
        outgoing.submit(1, make_request((1, 2)), Call(request_id="r", tenant=tenant))

    [message] = outgoing.pop_messages()

    assert [tenant_from_wire(one.tenant) for one in message.submits] == [
        Tenant(name="a", weight=2.5, queue_timeout_s=1.5),
        Tenant(name="b"),
    ]


def test_request_says_nothing_of_tenants_where_there_are_none() -> None:
    outgoing = SessionWriter(CancelCounts())
    submit(outgoing, 1)

    [message] = outgoing.pop_messages()

    assert not message.submits[0].HasField("tenant")


def test_requests_that_are_too_large_together_are_sent_in_separate_messages() -> None:
    outgoing = SessionWriter(CancelCounts())
    large = range(2**28, 2**28 + SUBMIT_BYTES_MAX // 8)  # Five bytes each.

    for stream_id in (1, 2, 3):
        submit(outgoing, stream_id, large)

    assert sent(outgoing) == [([1], []), ([2], []), ([3], [])]


def test_request_that_is_too_large_by_itself_is_refused() -> None:
    outgoing = SessionWriter(CancelCounts())

    with pytest.raises(Failure) as caught:
        submit(outgoing, 1, range(2**28, 2**28 + SUBMIT_BYTES_MAX // 5))

    assert caught.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("prompt", [range(2**28, 2**28 + SUBMIT_BYTES_MAX // 5), [1, 2**32]], ids=["large", "no token"])
def test_request_that_cannot_be_sent_leaves_nothing(prompt: Sequence[int]) -> None:
    outgoing = SessionWriter(CancelCounts())

    with pytest.raises((Failure, ValueError)):
        submit(outgoing, 1, prompt)
    submit(outgoing, 2)

    assert sent(outgoing) == [([2], [])]


def test_refused_requests_take_no_memory_while_nothing_is_sent() -> None:
    """A bug: each refused request left its memory allocated in the message that the next one used."""
    outgoing = SessionWriter(CancelCounts())
    large = make_request(range(2**28, 2**28 + SUBMIT_BYTES_MAX // 5))

    def refuse() -> float:
        with pytest.raises(Failure):
            outgoing.submit(2, large, Call(request_id="r"))
        return memory_mib(os.getpid(), "VmRSS")

    submit(outgoing, 1)
    first = refuse()
    last = [refuse() for _ in range(8)][-1]

    assert last - first < 2 * SUBMIT_BYTES_MAX / 2**20
    assert sent(outgoing) == [([1], [])]


def test_several_choices_are_sent_as_one_submit() -> None:
    outgoing = SessionWriter(CancelCounts())

    outgoing.submit(1, make_request(choice=2), Call(request_id="r"), choices=3)

    (message,) = outgoing.pop_messages()
    assert [(one.choices, one.request.choice) for one in message.submits] == [(3, 2)]


class Sent(FrameConnection[worker_pb2.WorkerMessage]):
    """A connection that records what is sent on it."""

    def __init__(self) -> None:
        super().__init__(worker_pb2.WorkerMessage, is_opener=True)
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def test_nothing_is_sent_while_the_worker_is_slow_to_read() -> None:
    outgoing, connection = SessionWriter(CancelCounts()), Sent()
    outgoing.connect(connection)
    connection.is_writable = False
    outgoing.cancel(1)
    outgoing.send()
    outgoing.cancel(2)
    assert connection.messages == []

    connection.is_writable = True
    outgoing.send()

    assert connection.messages == [worker_pb2.FrontendMessage(cancels=[1, 2], reads_logprob_columns=True)]


@pytest.mark.parametrize("is_writable", [True, False])
def test_worker_that_reads_nothing_for_too_long_is_stuck(is_writable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    outgoing, connection = SessionWriter(CancelCounts()), Sent()
    outgoing.connect(connection)
    connection.is_writable = is_writable
    now = asyncio.get_running_loop().time()

    assert now < outgoing.stuck_at() <= now + UNTAKEN_S_MAX
    now += UNTAKEN_S_MAX
    monkeypatch.setattr(outgoing._loop, "time", lambda: now)
    outgoing.keep_alive(now)

    assert (outgoing.stuck_at() <= now) is not is_writable


def test_keepalive_is_sent_after_a_long_silence() -> None:
    outgoing, connection = SessionWriter(CancelCounts()), Sent()
    outgoing.connect(connection)
    now = asyncio.get_running_loop().time()

    outgoing.keep_alive(now + KEEPALIVE_S / 2)
    assert connection.messages == []
    outgoing.keep_alive(now + KEEPALIVE_S + 1)

    assert connection.messages == [worker_pb2.FrontendMessage(reads_logprob_columns=True)]
