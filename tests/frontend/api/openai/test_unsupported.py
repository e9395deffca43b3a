"""Fields that ask for something else are refused by name, and so are misspelt ones."""

from typing import Any

import msgspec
import pytest

from services.core.errors import Failure
from services.frontend.api.openai.other_fields import NEVER, NO_EFFECT, at
from services.frontend.api.openai.unsupported import MISSPELT_CHARACTERS_MAX, UNKNOWN_FIELDS_MAX, FieldCheck, Place
from services.http.server.config import UnknownFields

OTHERS = {
    "count": at(1),
    "switch": at(False),
    "choice": at("none", "auto"),
    "list": at([]),
    "object": at({}),
    "never": NEVER,
    "label": NO_EFFECT,
    "stop_sequences": at([], use="stop"),
}
PLACE = Place(("max_tokens", "stop", "top_p", "temperature", "user"), OTHERS)
STRICT = Place(("schema", "name"), {}, is_strict=True)


def given(**fields: Any) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def check(
    fields: dict[str, msgspec.Raw],
    place: Place = PLACE,
    *,
    path: str = "",
    unknown_fields: UnknownFields = "refuse-misspelt",
) -> None:
    FieldCheck(unknown_fields).check(fields, place, path=path)


def refusal(fields: dict[str, msgspec.Raw], place: Place = PLACE, **options: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        check(fields, place, **options)
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
        ("made_up", 1),
        ("maxTokens", None),
    ],
)
def test_value_that_asks_for_nothing_is_accepted(name: str, value: Any) -> None:
    check(given(**{name: value}))


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
    check({"count": msgspec.Raw(written)})


def test_message_says_what_to_change() -> None:
    never = refusal(given(never=2)).detail
    neutral = refusal(given(count=2)).detail
    instead = refusal(given(stop_sequences=["a"])).detail

    assert never == "never is not supported in this version: leave it out"
    assert neutral == "count is not supported in this version: leave it out or set it to 1"
    assert instead == "stop_sequences is not supported in this version: leave it out or set it to [], or use stop"


def test_first_of_several_fields_is_named() -> None:
    """Bug: it was any of them, so another process named another field for the same request."""
    assert refusal(given(never=1, count=2, maxTokens=3)).param == "count"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_token", "max_tokens"),
        ("max_tokns", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("MAX_TOKENS", "max_tokens"),
        ("temprature", "temperature"),
        ("Stop", "stop"),
        ("topP", "top_p"),
        ("stopSequences", "stop"),
        ("Never", "never"),
    ],
)
@pytest.mark.parametrize("unknown_fields", ["refuse", "refuse-misspelt"])
def test_misspelt_field_is_refused_with_the_name_that_was_meant(
    unknown_fields: UnknownFields, name: str, meant: str
) -> None:
    failure = refusal(given(**{name: 1}), unknown_fields=unknown_fields)

    assert failure.param == name
    assert failure.detail == (
        f"{name!r} is not a field of this API: check its spelling, or leave it out. Did you mean {meant}?"
    )


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("temperature", "temprature"), ("never", "nevre"), ("label", "labels"), ("stop_sequences", "stop_sequnces")],
)
def test_misspelt_field_beside_the_right_one_is_refused(right: str, wrong: str) -> None:
    """Bug: it was ignored."""
    assert refusal({right: msgspec.Raw(b"null"), **given(**{wrong: 1})}).param == wrong


@pytest.mark.parametrize("name", ["neve", "labe", "swatch_it", "stops", "tempo", "users", "tags"])
def test_field_that_only_resembles_a_short_one_is_ignored(name: str) -> None:
    check({"stop": msgspec.Raw(b"null"), **given(**{name: 1})})


def test_other_spelling_of_a_field_that_is_given_is_refused() -> None:
    assert refusal(given(temperature_2=2)).param == "temperature_2"
    assert refusal(given(max_tokens=5, maxTokens=9)).param == "maxTokens", "it is another spelling"


@pytest.mark.parametrize("name", ["user_id", "chat_id", "tags", "x" * 100_000])
def test_field_without_likeness_to_one_that_matters_is_ignored(name: str) -> None:
    check(given(**{name: 1}))


def test_all_unknown_fields_can_be_refused() -> None:
    assert refusal(given(made_up=1), unknown_fields="refuse").detail.endswith("or leave it out.")


def test_all_unknown_fields_can_be_ignored_but_not_those_that_ask_for_something() -> None:
    check(given(made_up=1, maxTokens=5), unknown_fields="ignore")

    assert refusal(given(made_up=1, never=1), unknown_fields="ignore").param == "never"


@pytest.mark.parametrize("unknown_fields", ["refuse", "refuse-misspelt", "ignore"])
def test_unknown_field_is_never_ignored_where_the_answer_is_described(unknown_fields: UnknownFields) -> None:
    assert refusal(given(made_up=1), STRICT, unknown_fields=unknown_fields).param == "made_up"


def test_number_of_unknown_fields_is_bounded() -> None:
    """Comparing names takes time."""
    fields = FieldCheck("refuse-misspelt")
    many = given(**{f"made_up_{number}": 1 for number in range(UNKNOWN_FIELDS_MAX)})
    for _ in range(2):
        fields.check(many, PLACE)

    with pytest.raises(Failure, match=f"more than {UNKNOWN_FIELDS_MAX} fields") as caught:
        fields.check(given(one_more=1), PLACE)

    assert caught.value.param == "one_more"


def test_long_name_is_shortened_and_not_compared() -> None:
    failure = refusal(given(**{"max_tokens" + "s" * MISSPELT_CHARACTERS_MAX * 1000: 1}), unknown_fields="refuse")

    assert len(failure.param or "") <= 128
    assert len(failure.detail) < 1000
    assert "Did you mean" not in failure.detail


def test_path_names_the_place() -> None:
    failure = refusal(given(maxTokens=1), path="messages[3].")

    assert failure.param == "messages[3].maxTokens"
    assert failure.detail.startswith("'messages[3].maxTokens' is not a field of this API")
