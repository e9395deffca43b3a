"""Fields that ask for something else, and fields that no API has, are refused by name."""

from typing import Any

import msgspec
import pytest

from services.core.errors import Failure
from services.frontend.api.openai.other_fields import NEVER, NO_EFFECT, at
from services.frontend.api.openai.unsupported import Place, check_fields

PLACE = Place(
    ("max_tokens", "stop", "top_p", "temperature"),
    {
        "count": at(1),
        "switch": at(False),
        "choice": at("none", "auto"),
        "list": at([]),
        "object": at({}),
        "never": NEVER,
        "label": NO_EFFECT,
        "stop_sequences": at([], use="stop"),
    },
)


def given(**fields: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def refusal(fields: dict[str, msgspec.Raw], **options: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        check_fields(fields, PLACE, **options)
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 1),
        ("count", 1.0),
        ("switch", False),
        ("choice", "none"),
        ("choice", "auto"),
        ("list", []),
        ("object", {}),
        ("label", [1, {"a": 2}]),
        ("never", None),
        ("count", None),
        ("made_up", None),
    ],
)
def test_value_that_asks_for_nothing_is_accepted(name: str, value: Any) -> None:
    check_fields(given(**{name: value}), PLACE)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("count", 2),
        ("count", True),
        ("count", "1"),
        ("switch", True),
        ("switch", 0),
        ("choice", "required"),
        ("list", [1]),
        ("list", {}),
        ("object", {"a": None}),
        ("never", False),
        ("never", {}),
    ],
)
def test_value_that_only_looks_neutral_is_refused(name: str, value: Any) -> None:
    assert refusal(given(**{name: value})).param == name


@pytest.mark.parametrize("raw", [b"1e999", b"1" * 5000, b"[" * 100_000 + b"]" * 100_000])
def test_value_that_cannot_be_decoded_is_refused(raw: bytes) -> None:
    """Bug: it was a failure of the server."""
    assert refusal({"count": msgspec.Raw(raw)}).param == "count"


@pytest.mark.parametrize("written", [b"1", b"1.0", b"1e0"])
def test_neutral_number_may_be_written_in_any_way(written: bytes) -> None:
    check_fields({"count": msgspec.Raw(written)}, PLACE)


def test_message_says_what_to_change() -> None:
    never = refusal(given(never=2)).detail
    neutral = refusal(given(count=2)).detail
    instead = refusal(given(stop_sequences=["a"])).detail

    assert never == "never is not supported in this version: leave it out"
    assert neutral == "count is not supported in this version: leave it out or set it to 1"
    assert instead == "stop_sequences is not supported in this version: leave it out or set it to [], or use stop"


def test_first_of_several_fields_is_named() -> None:
    """Bug: it was any of them, so another process named another field for the same request."""
    assert refusal(given(never=1, count=2, made_up=3)).param == "count"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("temprature", "temperature"),
        ("Stop", "stop"),
        ("topP", "top_p"),
        ("stopSequences", "stop"),
    ],
)
def test_misspelt_field_is_refused_with_the_name_that_was_meant(name: str, meant: str) -> None:
    failure = refusal(given(**{name: 1}))

    assert failure.param == name
    assert failure.detail == (
        f"{name!r} is not a field of this API: check its spelling, or leave it out. Did you mean {meant}?"
    )


def test_unknown_field_that_resembles_none_gets_no_suggestion() -> None:
    assert refusal(given(xyzzy=1)).detail.endswith("or leave it out.")


def test_long_name_is_shortened() -> None:
    failure = refusal(given(**{"x" * 100_000: 1}))

    assert len(failure.param or "") <= 128
    assert len(failure.detail) < 1000


def test_path_names_the_place() -> None:
    failure = refusal(given(maxTokens=1), path="messages[3].")

    assert failure.param == "messages[3].maxTokens"
    assert "Did you mean messages[3].max_tokens?" in failure.detail


def test_unknown_fields_can_be_ignored_but_not_those_that_ask_for_something() -> None:
    check_fields(given(made_up=1), PLACE, ignores_unknown=True)

    assert refusal(given(made_up=1, never=1), ignores_unknown=True).param == "never"
