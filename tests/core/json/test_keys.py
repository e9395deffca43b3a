"""A key that is given twice in an object is refused by its path, however it is spelled."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure
from services.core.json.keys import PATH_CHARACTERS_MAX, check_keys
from services.core.json.size import CONTAINERS_MAX

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b'{"a": 1, "a": 1}', "a"),
        (b' {"a": 1, "b": 2, "a" : 3}', "a"),
        (rb'{"max_tokens": 1, "max\u005ftokens": 2}', "max_tokens"),
        (b'{"a": {"b": [{}, {"c": 1, "c": 2}]}}', "a.b[1].c"),
        (b'{"a": {"b": 1, "b": 2}, "c": 1, "c": 2}', "c"),
        (b'[{"": 1, "": 2}]', "[0]."),
        (b'{"a": 1e999, "a": ' + b"1" * 5000 + b"}", "a"),
        (b'{"' + b"x" * 1000 + b'": 1, "' + b"x" * 1000 + b'": 2}', "x" * PATH_CHARACTERS_MAX),
    ],
)
def test_repeated_key_is_refused_by_its_path(text: bytes, param: str) -> None:
    with pytest.raises(Failure, match="is given twice: give it once") as caught:
        check_keys(text)

    assert caught.value.param == param


def test_path_begins_where_the_value_is() -> None:
    with pytest.raises(Failure) as caught:
        check_keys(b'{"a": 1, "a": 2}', "guided_json")

    assert caught.value.param == "guided_json.a"


@pytest.mark.parametrize("text", [b'{"a": {"b": 1}, "b": {"a": 1}}', b'{"a": "a\\":1", "A": 1}', b"[]", b'"a:a"', b"1"])
def test_keys_of_different_objects_and_text_that_looks_like_a_key_are_fine(text: bytes) -> None:
    check_keys(text)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.data())
def test_exactly_repeated_keys_are_found(value: dict[str, Any], data: st.DataObject) -> None:
    """`distinct` as a body has it: the keys of the outermost object."""
    check_keys(json.dumps(value).encode(), distinct=len(value))
    if not value:
        return
    key = data.draw(st.sampled_from(sorted(value)))
    twice = f"{json.dumps(value)[:-1]}, {json.dumps(key)}: {json.dumps(data.draw(VALUES))}}}".encode()

    with pytest.raises(Failure) as caught:
        check_keys(twice, distinct=len(value))

    assert caught.value.param == key


def test_deep_nesting_is_a_failure() -> None:
    with pytest.raises(Failure, match="schema is nested too deeply"):
        check_keys(b'{"a":' * 16_000 + b"1" + b"}" * 16_000, "schema")


def test_text_that_is_too_large_to_decode_is_refused() -> None:
    with pytest.raises(Failure, match="schema has more than 16384 lists and objects") as caught:
        check_keys(b'{"a": [' + b"[]," * CONTAINERS_MAX + b"1]}", "schema")

    assert caught.value.param == "schema"
