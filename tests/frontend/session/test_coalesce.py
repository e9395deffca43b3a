"""Coalesce: merged or cut messages tell each stream the same, in the same order."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.session.coalesce import coalesce, split
from services.rpc.step import MERGED_TOKENS_MAX, read_entries
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from services.stubs.worker_pb2 import GoAway, Load, Located, RankLoad, Step, StreamEnd, Welcome, WorkerMessage
from tests.support.steps import add_logprobs, step_of


def message_of(*entries: tuple[int, int, Sequence[int]], **fields: Any) -> WorkerMessage:
    """A message with these entries in its step, and other fields."""
    return WorkerMessage(step=step_of(*entries), **fields)


def end(stream_id: int) -> StreamEnd:
    return StreamEnd(stream_id=stream_id, finish_reason=FINISH_REASON_STOP, complete_final=True)


def heard(messages: Sequence[WorkerMessage]) -> dict[int, list[Any]]:
    """The items that each stream gets, token by token."""
    log: dict[int, list[Any]] = {}
    for message in messages:
        for stream_id in message.begun:
            log.setdefault(stream_id, []).append("begun")
        for stream_id, position, token_ids, _ in read_entries(message.step):
            log.setdefault(stream_id, []).extend(enumerate(token_ids, position))
        for one in message.ends:
            log.setdefault(one.stream_id, []).append("end")
    return log


# Merge


def test_tokens_of_several_messages_become_one_entry_for_each_stream() -> None:
    messages = [
        message_of((1, 0, [10]), (2, 5, [20])),
        message_of((1, 1, [11]), (3, 0, [30])),
        message_of((1, 2, [12, 13])),
    ]

    assert coalesce(messages) == [message_of((1, 0, [10, 11, 12, 13]), (2, 5, [20]), (3, 0, [30]))]


def test_records_of_resumed_answers_are_not_copied_into_another_message() -> None:
    """To copy their tokens takes longer than to deliver them apart from those of other streams."""
    record = range(MERGED_TOKENS_MAX + 1)
    messages = [message_of((1, 0, [10])), message_of((2, 0, record)), message_of((2, len(record), [20]), (1, 1, [11]))]

    assert coalesce(messages) == messages


def test_single_message_stays_the_same_object() -> None:
    message = message_of((1, 0, [10]))

    assert coalesce([message])[0] is message


def test_begun_and_ends_keep_their_order_and_the_last_load_counts() -> None:
    loads = [Load(running=2, ranks=[RankLoad(kv_blocks_used=7)]), Load(waiting=1, ranks=[RankLoad()])]
    messages = [
        message_of((1, 0, [10]), begun=[1], ends=[end(1)], load=loads[0]),
        message_of((2, 0, [20]), begun=[2], ends=[end(2)], load=loads[1], goaway=GoAway()),
    ]

    assert coalesce(messages) == [
        message_of((1, 0, [10]), (2, 0, [20]), begun=[1, 2], ends=[end(1), end(2)], load=loads[1], goaway=GoAway())
    ]


def test_messages_without_tokens_become_one_without_a_step() -> None:
    """A bug: merged heartbeats had an empty step, which counted as progress of an engine that stood still."""
    assert coalesce([WorkerMessage(load=Load(running=1))] * 2) == [WorkerMessage(load=Load(running=1))]


def test_rank_that_the_last_load_does_not_name_keeps_its_last_report() -> None:
    """A bug: a heartbeat without ranks, which is no report, removed the report before it."""
    loads = [
        Load(running=1, ranks=[RankLoad(dp_rank=0, kv_blocks_used=1), RankLoad(dp_rank=1, kv_blocks_used=2)]),
        Load(running=2, ranks=[RankLoad(dp_rank=1, kv_blocks_used=3)]),
        Load(running=3),
    ]

    [merged] = coalesce([WorkerMessage(load=load) for load in loads])

    assert merged.load.running == 3
    assert {rank.dp_rank: rank.kv_blocks_used for rank in merged.load.ranks} == {0: 1, 1: 3}


@pytest.mark.parametrize(
    "messages",
    [
        [message_of((1, 0, [10])), message_of((1, 2, [12]))],
        [message_of((1, 0, [10]), ends=[end(1)]), message_of((1, 1, [11]))],
        [message_of((1, 0, [10]), (1, 1, [11])), message_of((1, 2, [12]))],
        [WorkerMessage(step=Step(stream_ids=[1])), message_of((1, 0, [10]))],
        [message_of((1, 0, [10])), WorkerMessage(step=Step(stream_ids=[1], positions=[1], token_counts=[5]))],
        [message_of((1, 0, [10]), goaway=GoAway()), message_of((1, 1, [11]))],
        [message_of((1, 0, [10])), message_of((1, 1, []))],
        [message_of((1, 0, [10])), WorkerMessage(welcome=Welcome())],
        [message_of((1, 0, [10])), WorkerMessage(step=add_logprobs(step_of((2, 0, [20])), (0, [-1, -2])))],
    ],
    ids=[
        "a gap",
        "tokens after the end",
        "a stream twice in a step",
        "a malformed step first",
        "a malformed step later",
        "tokens after a goaway",
        "no tokens",
        "a second welcome",
        "too many log probabilities",
    ],
)
def test_messages_that_break_the_protocol_are_left_for_the_session_to_reject(messages: list[WorkerMessage]) -> None:
    assert coalesce(messages) == messages


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), max_size=5), max_size=8))
def test_coalesced_messages_tell_each_stream_the_same(plan: list[list[tuple[int, int, bool]]]) -> None:
    """`plan`: for each message the streams that get tokens, how many, and whether their end follows."""
    position: dict[int, int] = {}
    ended: set[int] = set()
    messages = []
    for entries in plan:
        columns, begun, ends = [], [], []
        for stream_id, count, is_last in {entry[0]: entry for entry in entries}.values():
            if stream_id not in ended:
                start = position.setdefault(stream_id, 0)
                begun += [stream_id] * (start == 0)
                columns.append((stream_id, start, range(start, start + count)))
                position[stream_id] += count
                ends += [end(stream_id)] * is_last
                ended |= {stream_id} if is_last else set()
        messages.append(message_of(*columns, begun=begun, ends=ends))

    fewer = coalesce(messages)

    assert heard(fewer) == heard(messages)
    assert len(fewer) == min(1, len(messages))


# Cut


def test_message_about_few_streams_is_not_cut() -> None:
    message = message_of((1, 0, [10]), (2, 0, [20]), ends=[end(1)])

    assert split(message, 2) == [message]


def test_first_part_has_what_comes_before_the_tokens_and_the_last_part_what_comes_after_them() -> None:
    before = {"welcome": Welcome(instance_id="i"), "load": Load(running=3), "begun": [1, 2]}
    after = {"ends": [end(1), end(3)], "goaway": GoAway()}
    message = message_of((1, 0, [10]), (2, 0, [20]), (3, 0, [30]), **before, **after)

    assert split(message, 1) == [
        message_of((1, 0, [10]), **before),
        message_of((2, 0, [20])),
        message_of((3, 0, [30]), **after),
    ]


def test_parts_of_a_message_merge_into_the_message() -> None:
    entries = [(number, number, [number] * (number % 3 + 1)) for number in range(100)]
    message = message_of(*entries, begun=[7], ends=[end(9)])

    assert coalesce(split(message, 7)) == [message]


def test_message_with_a_malformed_step_is_not_cut() -> None:
    message = WorkerMessage(step=Step(stream_ids=[1, 2, 3], positions=[0, 0], token_counts=[1, 1, 1], token_ids=[7]))

    assert split(message, 2) == [message]


# Answers to questions


def test_replies_of_merged_messages_are_all_kept_in_order() -> None:
    messages = [message_of((1, number, [10]), located=[Located(query=number)]) for number in range(3)]

    (merged,) = coalesce(messages)

    assert [one.query for one in merged.located] == [0, 1, 2]


def test_replies_of_a_message_that_is_cut_come_once_after_all_its_tokens() -> None:
    message = message_of((1, 0, [10]), (2, 0, [20]), (3, 0, [30]), located=[Located(query=7)])

    parts = split(message, 1)

    assert [[one.query for one in part.located] for part in parts] == [[], [], [7]]
