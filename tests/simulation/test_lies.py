"""What simulated workers say that ours would not: lies break the protocol, and late ends do not."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.interface import Finish
from services.core.request import FinishReason
from services.frontend.session.stream_table import COMPLETION_S_MAX
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from services.worker.outbox import Outbox
from simulation.scenario.lies import _ACTS, LateEnds, _leave_out_marker
from tests.frontend.support import BareWorker
from tests.support.clock import pass_time, run_clocked
from tests.support.steps import step_of


def ending(*stream_ids: int) -> worker_pb2.WorkerMessage:
    """The second token of each stream, and its end."""
    ends = [
        worker_pb2.StreamEnd(stream_id=one, finish_reason=FINISH_REASON_STOP, complete_final=True) for one in stream_ids
    ]
    return worker_pb2.WorkerMessage(step=step_of(*((one, 1, (8,)) for one in stream_ids)), ends=ends)


async def outcome_after(act: Callable[[Any], bool]) -> Finish | Failure:
    worker = BareWorker()
    stream = worker.open()
    worker.tokens(stream.id, 0, 7)
    message = ending(stream.id)
    assert act(message)
    worker.session._reader.on_messages([message])
    pass_time(COMPLETION_S_MAX)
    worker.session.check(COMPLETION_S_MAX)
    return stream.ended.exception() or stream.ended.result()  # type: ignore[return-value]


@pytest.mark.parametrize("act", [act for act in _ACTS if act is not _leave_out_marker])
def test_lie_breaks_the_protocol(act: Callable[[Any], bool]) -> None:
    outcome = run_clocked(outcome_after(act))

    assert isinstance(outcome, Failure)
    assert outcome.reason is Reason.PROTOCOL_VIOLATION


def test_stream_whose_end_is_not_marked_ends_well_after_a_while() -> None:
    assert isinstance(run_clocked(outcome_after(_leave_out_marker)), Finish)


@pytest.mark.parametrize("act", _ACTS)
def test_message_without_tokens_and_ends_stays_as_it_is(act: Callable[[Any], bool]) -> None:
    message = worker_pb2.WorkerMessage(load=worker_pb2.Load(running=1))

    assert not act(message)
    assert message == worker_pb2.WorkerMessage(load=worker_pb2.Load(running=1))


def test_late_ends_come_with_the_next_message_and_none_is_lost() -> None:
    late, outbox = LateEnds.__new__(LateEnds), Outbox(lambda: None)
    late._chance = random.Random(1)
    said: list[list[int]] = []
    for first in range(0, 30, 3):
        for stream_id in range(first, first + 3):
            outbox.add_finish(stream_id, FinishReason.STOP)
        message = outbox.pop_message()
        late._on_message(message, outbox)
        said.append([end.stream_id for end in message.ends])
    assert outbox.has_ends, "the worker knows that it owes some"
    said.append([end.stream_id for end in outbox.pop_message().ends])

    assert sorted(number for numbers in said for number in numbers) == list(range(30))
    assert any(len(numbers) < 3 for numbers in said)
