"""Joined: fewer messages that say the same, stream by stream, in the same order."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.session.coalesce import coalesce, split
from services.stubs.inference_pb2 import FINISH_REASON_STOP, TokenLogprobs
from services.stubs.worker_pb2 import EntryLogprobs, GoAway, Load, RankLoad, Step, StreamEnd, Welcome, WorkerMessage


def step(*entries: tuple[int, int, Sequence[int]], **fields: Any) -> WorkerMessage:
    """entries: stream id, position, tokens."""
    columns = Step(
        stream_ids=[one for one, _, _ in entries],
        positions=[position for _, position, _ in entries],
        token_counts=[len(token_ids) for _, _, token_ids in entries],
        token_ids=[token for _, _, token_ids in entries for token in token_ids],
    )
    return WorkerMessage(step=columns, **fields)


def end(stream_id: int) -> StreamEnd:
    return StreamEnd(stream_id=stream_id, finish_reason=FINISH_REASON_STOP, complete_final=True)


def test_the_tokens_of_a_stream_become_one_entry() -> None:
    messages = [step((1, 0, [10]), (2, 5, [20])), step((1, 1, [11]), (3, 0, [30])), step((1, 2, [12, 13]))]

    assert coalesce(messages) == [step((1, 0, [10, 11, 12, 13]), (2, 5, [20]), (3, 0, [30]))]


def test_ends_and_begun_come_in_their_order_and_of_loads_the_last() -> None:
    loads = [Load(running=2, ranks=[RankLoad(kv_blocks_used=7)]), Load(waiting=1, ranks=[RankLoad()])]
    messages = [
        step((1, 0, [10]), begun=[1], ends=[end(1)], load=loads[0]),
        step((2, 0, [20]), begun=[2], ends=[end(2)], load=loads[1], goaway=GoAway()),
    ]

    assert coalesce(messages) == [
        step((1, 0, [10]), (2, 0, [20]), begun=[1, 2], ends=[end(1), end(2)], load=loads[1], goaway=GoAway())
    ]


def test_log_probabilities_stay_with_their_tokens() -> None:
    messages = [step((1, 0, [10]), (2, 0, [20])), step((2, 1, [21]), (1, 1, [11]))]
    messages[0].step.logprobs.append(EntryLogprobs(entry=1, tokens=[TokenLogprobs(logprob=-20)]))
    messages[1].step.logprobs.append(EntryLogprobs(entry=0, tokens=[TokenLogprobs(logprob=-21)]))

    [whole] = coalesce(messages)

    [only] = whole.step.logprobs
    assert whole.step.stream_ids[only.entry] == 2
    assert [one.logprob for one in only.tokens] == [-20, -21]


def test_a_rank_that_the_last_load_does_not_name_keeps_what_it_said() -> None:
    """A bug: a heartbeat without ranks, which is no report, took the report before it away."""
    said = [
        Load(running=1, ranks=[RankLoad(dp_rank=0, kv_blocks_used=1), RankLoad(dp_rank=1, kv_blocks_used=2)]),
        Load(running=2, ranks=[RankLoad(dp_rank=1, kv_blocks_used=3)]),
        Load(running=3),
    ]

    [whole] = coalesce([WorkerMessage(load=load) for load in said])

    assert whole.load.running == 3
    assert {rank.dp_rank: rank.kv_blocks_used for rank in whole.load.ranks} == {0: 1, 1: 3}


def with_logprobs(message: WorkerMessage, *entries: tuple[int, int]) -> WorkerMessage:
    """entries: the index of each, and for how many tokens."""
    message.step.logprobs.extend(
        EntryLogprobs(entry=entry, tokens=[TokenLogprobs()] * length) for entry, length in entries
    )
    return message


@pytest.mark.parametrize(
    "messages",
    [
        [step((1, 0, [10])), step((1, 2, [12]))],
        [step((1, 0, [10]), ends=[end(1)]), step((1, 1, [11]))],
        [step((1, 0, [10]), (1, 1, [11])), step((1, 2, [12]))],
        [WorkerMessage(step=Step(stream_ids=[1])), step((1, 0, [10]))],
        [step((1, 0, [10])), WorkerMessage(step=Step(stream_ids=[1], positions=[1], token_counts=[5]))],
        [step((1, 0, [10]), goaway=GoAway()), step((1, 1, [11]))],
        [step((1, 0, [10])), step((1, 1, []))],
        [step((1, 0, [10])), WorkerMessage(welcome=Welcome())],
        [step((1, 0, [10])), with_logprobs(step((2, 0, [20])), (1, 1))],
        [step((1, 0, [10])), with_logprobs(step((2, 0, [20])), (0, 1), (0, 1))],
        [step((1, 0, [10])), with_logprobs(step((2, 0, [20])), (0, 2))],
        [with_logprobs(step((1, 0, [10])), (0, 1)), step((1, 1, [11]))],
        [step((1, 0, [10])), with_logprobs(step((1, 1, [11])), (0, 1))],
    ],
    ids=[
        "a gap",
        "tokens after the end",
        "a stream twice in a step",
        "columns of unequal length",
        "and after sound ones",
        "tokens after a goaway",
        "no tokens",
        "a second welcome",
        "log probabilities of no entry",
        "twice of one entry",
        "too many of one entry",
        "none for later tokens",
        "none for earlier tokens",
    ],
)
def test_what_breaks_the_rules_is_left_for_whoever_checks_them(messages: list[WorkerMessage]) -> None:
    assert coalesce(messages) == messages


def told(messages: Sequence[WorkerMessage]) -> dict[int, list[Any]]:
    """What each stream is told, token by token."""
    log: dict[int, list[Any]] = {}
    for message in messages:
        for stream_id in message.begun:
            log.setdefault(stream_id, []).append("begun")
        token_ids = iter(message.step.token_ids)
        columns = zip(message.step.stream_ids, message.step.positions, message.step.token_counts, strict=True)
        for stream_id, position, count in columns:
            log.setdefault(stream_id, []).extend((position + index, next(token_ids)) for index in range(count))
        for one in message.ends:
            log.setdefault(one.stream_id, []).append("end")
    return log


@given(st.lists(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), max_size=5), max_size=8))
def test_each_stream_is_told_the_same(plan: list[list[tuple[int, int, bool]]]) -> None:
    """plan: for each message the streams that get so many tokens, and perhaps their end: nothing follows it."""
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
        messages.append(step(*columns, begun=begun, ends=ends))

    fewer = coalesce(messages)

    assert told(fewer) == told(messages)
    assert len(fewer) == min(1, len(messages))


def test_a_message_about_few_streams_stays_as_it_is() -> None:
    message = step((1, 0, [10]), (2, 0, [20]), ends=[end(1)])

    assert split(message, 2) == [message]


def test_each_has_its_part_of_the_streams_and_their_tokens() -> None:
    message = step((1, 0, [10, 11]), (2, 5, [20]), (3, 7, [30, 31, 32]))

    assert split(message, 2) == [step((1, 0, [10, 11]), (2, 5, [20])), step((3, 7, [30, 31, 32]))]


def test_what_comes_before_the_tokens_is_in_the_first_and_what_comes_after_them_in_the_last() -> None:
    before = {"welcome": Welcome(instance_id="i"), "load": Load(running=3), "begun": [1, 2]}
    after = {"ends": [end(1), end(3)], "goaway": GoAway()}
    message = step((1, 0, [10]), (2, 0, [20]), (3, 0, [30]), **before, **after)

    assert split(message, 1) == [step((1, 0, [10]), **before), step((2, 0, [20])), step((3, 0, [30]), **after)]


def test_log_probabilities_stay_with_their_tokens_when_a_message_is_cut() -> None:
    message = step(*((number, 0, [number]) for number in range(5)))
    for entry in (1, 4):
        message.step.logprobs.append(EntryLogprobs(entry=entry, tokens=[TokenLogprobs(logprob=-entry)]))

    told = [
        (piece.step.stream_ids[one.entry], one.tokens[0].logprob)
        for piece in split(message, 2)
        for one in piece.step.logprobs
    ]

    assert told == [(1, -1), (4, -4)]


def test_joined_again_they_are_the_message() -> None:
    message = step(*((number, number, [number] * (number % 3 + 1)) for number in range(100)), begun=[7], ends=[end(9)])

    assert coalesce(split(message, 7)) == [message]


@pytest.mark.parametrize(
    "broken",
    [
        Step(stream_ids=[1, 2, 3], positions=[0, 0], token_counts=[1, 1, 1], token_ids=[1, 2, 3]),
        Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1], token_ids=[1, 2, 3]),
        Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1, 2], token_ids=[1, 2, 3]),
    ],
    ids=["positions", "counts", "tokens"],
)
def test_an_invalid_message_is_not_cut(broken: Step) -> None:
    message = WorkerMessage(step=broken)

    assert split(message, 2) == [message]
