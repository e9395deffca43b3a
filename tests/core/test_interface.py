"""The interface of a step: what a delta weighs, and which fields of a call carry data beside requests and tokens."""

import re

import pytest

from services.core import interface
from services.core.call import Attempt, Call, Ending, Told
from services.core.choice_group import ChoiceGroup
from services.core.generation.kept import Kept
from services.core.interface import Delta, TokenLogprobs

IMMUTABLE = {"tenant", "request_id", "deadline", "endpoint", "is_streamed", "migration_limit", "card", "excluded"}
IMMUTABLE |= {"replacement_deadline", "counts_prompt"}


@pytest.mark.parametrize(
    ("delta", "weight"),
    [
        (Delta(0, ()), 0),
        (Delta(0, [7, 8]), 2),
        (Delta(0, [7, 8], logprobs=[TokenLogprobs(-1.0), TokenLogprobs(-2.0)]), 4),
        (Delta(0, [7], logprobs=[TokenLogprobs(-1.0, ((1, -2.0), (2, -3.0)))]), 4),
    ],
    ids=["no tokens", "tokens", "with log probabilities", "with alternatives"],
)
def test_the_weight_of_a_delta_counts_tokens_and_each_log_probability(delta: Delta, weight: int) -> None:
    assert delta.weight == weight


def test_the_docstring_names_every_field_of_a_call_that_can_change_after_the_call_was_made() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", interface.__doc__ or "", re.MULTILINE))

    assert named == set(Call.__struct_fields__) - IMMUTABLE


@pytest.mark.parametrize("mailbox", [Ending, Told, Attempt, ChoiceGroup, Kept])
def test_a_call_holds_each_of_the_mutable_objects_once(mailbox: type) -> None:
    held = [annotation for annotation in Call.__annotations__.values() if mailbox.__name__ in str(annotation)]

    assert len(held) == 1
