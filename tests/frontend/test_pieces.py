"""Pieces: a message about very many streams, cut into messages that say the same in the same order."""

import pytest

from services.frontend.joined import joined
from services.frontend.pieces import pieces
from services.stubs.inference_pb2 import TokenLogprobs
from services.stubs.worker_pb2 import AttachResponse, EntryLogprobs, GoAway, Load, Step, Welcome
from tests.frontend.test_joined import end, step


def test_a_message_about_few_streams_stays_as_it_is() -> None:
    message = step((1, 0, [10]), (2, 0, [20]), ends=[end(1)])

    assert pieces(message, 2) == [message]


def test_each_has_its_part_of_the_streams_and_their_tokens() -> None:
    message = step((1, 0, [10, 11]), (2, 5, [20]), (3, 7, [30, 31, 32]))

    assert pieces(message, 2) == [step((1, 0, [10, 11]), (2, 5, [20])), step((3, 7, [30, 31, 32]))]


def test_what_comes_before_the_tokens_is_in_the_first_and_what_comes_after_them_in_the_last() -> None:
    before = {"welcome": Welcome(instance_id="i"), "load": Load(running=3), "begun": [1, 2]}
    after = {"ends": [end(1), end(3)], "goaway": GoAway()}
    message = step((1, 0, [10]), (2, 0, [20]), (3, 0, [30]), **before, **after)

    assert pieces(message, 1) == [step((1, 0, [10]), **before), step((2, 0, [20])), step((3, 0, [30]), **after)]


def test_log_probabilities_stay_with_their_tokens() -> None:
    message = step(*((number, 0, [number]) for number in range(5)))
    for entry in (1, 4):
        message.step.logprobs.append(EntryLogprobs(entry=entry, tokens=[TokenLogprobs(logprob=-entry)]))

    told = [
        (piece.step.stream_ids[one.entry], one.tokens[0].logprob)
        for piece in pieces(message, 2)
        for one in piece.step.logprobs
    ]

    assert told == [(1, -1), (4, -4)]


def test_joined_again_they_are_the_message() -> None:
    message = step(*((number, number, [number] * (number % 3 + 1)) for number in range(100)), begun=[7], ends=[end(9)])

    assert joined(pieces(message, 7)) == [message]


@pytest.mark.parametrize(
    "broken",
    [
        Step(stream_ids=[1, 2, 3], positions=[0, 0], token_counts=[1, 1, 1], token_ids=[1, 2, 3]),
        Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1], token_ids=[1, 2, 3]),
        Step(stream_ids=[1, 2, 3], positions=[0, 0, 0], token_counts=[1, 1, 2], token_ids=[1, 2, 3]),
    ],
    ids=["positions", "counts", "tokens"],
)
def test_what_breaks_the_rules_is_left_for_whoever_checks_them(broken: Step) -> None:
    message = AttachResponse(step=broken)

    assert pieces(message, 2) == [message]
