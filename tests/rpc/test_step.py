"""The token columns of a step: what is put in is read back, malformed columns are found, and merging and cutting steps
change nothing that a stream gets.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.interface import TokenLogprobs
from services.rpc.step import Entries, StepRun, cut, put_entries, read_entries
from services.stubs.worker_pb2 import LogprobColumns, Step
from tests.support.steps import add_logprobs, step_of


def _with_columns(**columns: Any) -> Step:
    return Step(
        stream_ids=[1], positions=[0], token_counts=[1], token_ids=[7], logprob_columns=LogprobColumns(**columns)
    )


MALFORMED = {
    "too few streams": Step(stream_ids=[1, 2], positions=[0, 0, 0], token_counts=[1, 1, 1], token_ids=[1, 2, 3]),
    "too few positions": Step(stream_ids=[1, 2, 3], positions=[0, 0], token_counts=[1, 1, 1], token_ids=[1, 2, 3]),
    "too few counts": Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1], token_ids=[1, 2, 3]),
    "too few tokens": Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1, 2], token_ids=[1, 2, 3]),
    "too many tokens": Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1, 0], token_ids=[1, 2, 3]),
    "streams alone": Step(stream_ids=[1]),
    "log probabilities of an unknown entry": add_logprobs(step_of((1, 0, [7])), (1, [-1])),
    "log probabilities of an unknown entry, but none": add_logprobs(step_of((1, 0, [7])), (1, [])),
    "log probabilities of one entry twice": add_logprobs(step_of((1, 0, [7])), (0, [-1]), (0, [-1])),
    "entries in another order": add_logprobs(step_of((1, 0, [7]), (2, 0, [8])), (1, [-1]), (0, [-1])),
    "too many log probabilities": add_logprobs(step_of((1, 0, [7])), (0, [-1, -2])),
    "too few log probabilities": add_logprobs(step_of((1, 0, [7, 8])), (0, [-1])),
    "too few counts of likely tokens": _with_columns(entries=[0], logprobs=[-1], top_counts=[]),
    "too few likely tokens": _with_columns(entries=[0], logprobs=[-1], top_counts=[1], top_logprobs=[-1]),
    "too few values of likely tokens": _with_columns(entries=[0], logprobs=[-1], top_counts=[1], top_token_ids=[7]),
}

ENTRIES = st.dictionaries(
    st.integers(1, 2**32 - 1),
    st.tuples(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3)),
    max_size=6,
)


def try_merge(*steps: Step) -> Step | None:
    """The steps as one; None if they cannot be merged."""
    run, merged = StepRun(), Step()
    if not all(run.try_append(step) for step in steps):
        return None
    run.merge_into(merged)
    return merged


# Write and read


@pytest.mark.parametrize("has_columns", [True, False], ids=["columns", "items"])
@given(entries=ENTRIES, data=st.data())
def test_entries_are_read_as_they_were_written(has_columns: bool, entries: Entries, data: st.DataObject) -> None:
    """The log probabilities are in columns, or in items for peers of earlier versions."""
    floats = st.floats(width=32, allow_nan=False)
    logprobs = {
        stream_id: [
            TokenLogprobs(data.draw(floats), ((token, data.draw(floats)),) * data.draw(st.integers(0, 2)))
            for token in token_ids
        ]
        for stream_id, (_, token_ids) in entries.items()
        if data.draw(st.booleans())
    }
    step = Step()

    put_entries(step, entries, logprobs, has_columns=has_columns)

    assert bool(step.logprobs) is (bool(logprobs) and not has_columns)
    assert list(read_entries(Step.FromString(step.SerializeToString()))) == [
        (stream_id, position, token_ids, logprobs.get(stream_id))
        for stream_id, (position, token_ids) in entries.items()
    ]


def test_one_token_and_several_tokens_for_each_entry_are_read_alike() -> None:
    assert list(read_entries(step_of((1, 0, [7]), (2, 5, [8])))) == [(1, 0, [7], None), (2, 5, [8], None)]
    assert list(read_entries(step_of((1, 0, [7, 8]), (2, 5, [9])))) == [(1, 0, [7, 8], None), (2, 5, [9], None)]


def test_entry_without_tokens_is_read_for_its_stream_to_refuse() -> None:
    assert list(read_entries(step_of((1, 0, []), (2, 5, [8, 9])))) == [(1, 0, [], None), (2, 5, [8, 9], None)]


@pytest.mark.parametrize("step", MALFORMED.values(), ids=MALFORMED)
def test_columns_of_unequal_length_are_a_violation_before_any_entry_is_read(step: Step) -> None:
    with pytest.raises(Failure) as caught:
        read_entries(step)

    assert caught.value.reason is Reason.PROTOCOL_VIOLATION


# Merge


def test_entries_of_one_stream_are_merged_where_its_first_was() -> None:
    merged = try_merge(step_of((1, 0, [10]), (2, 5, [20])), step_of((3, 0, [30]), (1, 1, [11, 12])))

    assert merged == step_of((1, 0, [10, 11, 12]), (2, 5, [20]), (3, 0, [30]))


def test_log_probabilities_stay_with_their_tokens_when_steps_are_merged() -> None:
    merged = try_merge(
        add_logprobs(step_of((1, 0, [10]), (2, 0, [20])), (1, [-20])),
        add_logprobs(step_of((2, 1, [21]), (1, 1, [11])), (0, [-21])),
    )

    assert merged == add_logprobs(step_of((1, 0, [10, 11]), (2, 0, [20, 21])), (1, [-20, -21]))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (step_of((1, 0, [10])), step_of((1, 2, [12]))),
        (step_of((1, 0, [10])), step_of((2, 0, [20]), (2, 1, [21]))),
        (step_of((1, 0, [10])), step_of((1, 1, []))),
        (add_logprobs(step_of((1, 0, [10])), (0, [-1])), step_of((1, 1, [11]))),
        (step_of((1, 0, [10])), add_logprobs(step_of((1, 1, [11])), (0, [-1]))),
    ],
    ids=[
        "a gap",
        "a stream twice in a step",
        "no tokens",
        "no log probabilities for later tokens",
        "no log probabilities for earlier tokens",
    ],
)
def test_step_that_does_not_continue_the_run_is_not_merged(first: Step, second: Step) -> None:
    run, merged = StepRun(), Step()
    assert run.try_append(first)

    assert not run.try_append(second)

    run.merge_into(merged)
    assert merged == first


@pytest.mark.parametrize("step", MALFORMED.values(), ids=MALFORMED)
def test_malformed_step_is_not_merged(step: Step) -> None:
    assert not StepRun().try_append(step)


def test_step_of_a_worker_that_writes_no_columns_of_log_probabilities_is_neither_merged_nor_cut() -> None:
    step = Step()
    put_entries(step, {1: (0, [7]), 2: (0, [8])}, {2: [TokenLogprobs(-1.0)]}, has_columns=False)

    assert not StepRun().try_append(step)
    assert cut(step, 1) == [step]


# Cut


def test_step_with_few_entries_is_not_cut() -> None:
    step = step_of((1, 0, [10]), (2, 0, [20]))

    assert cut(step, 2) == [step]


def test_each_part_of_a_cut_step_has_its_entries_and_their_tokens() -> None:
    step = step_of((1, 0, [10, 11]), (2, 5, [20]), (3, 7, [30, 31, 32]))

    assert cut(step, 2) == [step_of((1, 0, [10, 11]), (2, 5, [20])), step_of((3, 7, [30, 31, 32]))]


def test_log_probabilities_stay_with_their_tokens_when_a_step_is_cut() -> None:
    step = add_logprobs(step_of(*((stream_id, 0, [7]) for stream_id in range(5))), (1, [-1]), (4, [-4]))

    parts = cut(step, 2)

    assert [entry for part in parts for entry in read_entries(part)] == list(read_entries(step))


@given(ENTRIES, st.integers(1, 6))
def test_parts_of_a_cut_step_merge_into_the_step(entries: Entries, streams_max: int) -> None:
    step = Step()
    put_entries(step, entries, {})

    parts = cut(step, streams_max)

    assert all(len(part.stream_ids) <= streams_max for part in parts)
    assert try_merge(*parts) == step


@pytest.mark.parametrize("step", [step for step in MALFORMED.values() if len(step.stream_ids) > 1])
def test_malformed_step_is_not_cut(step: Step) -> None:
    assert cut(step, 1) == [step]
