"""Unsupported fields are refused by name, unless their value changes nothing."""

from typing import Any

import msgspec
import pytest

from services.core.errors import Failure
from services.frontend.api.openai.bodies import ChatBody, ChatMessage, CompletionBody
from services.frontend.api.openai.unsupported import (
    NEUTRAL,
    NEUTRAL_IN_CHAT,
    NEUTRAL_IN_COMPLETION,
    NEUTRAL_IN_MESSAGE,
    refuse_unsupported,
)


def given(name: str, value: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value))}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NEUTRAL for value in (*NEUTRAL[name], None)])
def test_neutral_values_are_accepted(name: str, value: Any) -> None:
    refuse_unsupported(given(name, value), NEUTRAL)


def test_neutral_number_may_be_written_in_any_way() -> None:
    for written in (b"1", b"1.0", b"1e0"):
        refuse_unsupported({"best_of": msgspec.Raw(written)}, NEUTRAL)
        refuse_unsupported({"length_penalty": msgspec.Raw(written)}, NEUTRAL)


@pytest.mark.parametrize("name", list(NEUTRAL))
def test_other_values_are_refused_by_name(name: str) -> None:
    with pytest.raises(Failure, match=f"{name} is not supported in this version: leave it out") as caught:
        refuse_unsupported(given(name, {"asks": "for something"}), NEUTRAL)

    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("best_of", True),
        ("best_of", 0),
        ("priority", -1),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
    ],
)
def test_values_that_only_look_neutral_are_refused(name: str, value: Any) -> None:
    with pytest.raises(Failure):
        refuse_unsupported(given(name, value), NEUTRAL)


def test_message_says_what_to_change() -> None:
    with pytest.raises(Failure) as caught:
        refuse_unsupported(given("best_of", 2), NEUTRAL)

    assert caught.value.detail == "best_of is not supported in this version: leave it out or set it to 1"


def test_first_of_several_unsupported_fields_is_named() -> None:
    """Bug: it was any of them, so another process named another field for the same request."""
    with pytest.raises(Failure) as caught:
        refuse_unsupported(dict.fromkeys(NEUTRAL, msgspec.Raw(b'"x"')), NEUTRAL)

    assert caught.value.param == min(NEUTRAL)


def test_field_that_one_endpoint_lacks_is_refused_there() -> None:
    refuse_unsupported(given("top_logprobs", 0), NEUTRAL_IN_COMPLETION)

    with pytest.raises(Failure, match="top_logprobs"):
        refuse_unsupported(given("top_logprobs", 1), NEUTRAL_IN_COMPLETION)


def test_no_field_is_both_supported_and_unsupported() -> None:
    """A body that has only supported fields is not checked for others."""
    for body, neutral in ((CompletionBody, NEUTRAL_IN_COMPLETION), (ChatBody, NEUTRAL_IN_CHAT)):
        assert neutral.keys().isdisjoint(body.__struct_fields__)
    assert NEUTRAL_IN_MESSAGE.keys().isdisjoint(ChatMessage.__struct_fields__)
