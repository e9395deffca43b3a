"""A key that is given twice in an object is refused by its path, however it is spelled."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.json.keys import CONTAINERS_MAX, PATH_CHARACTERS_MAX, check_keys

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
        check_keys(b'{"a":' * 60_000 + b"1" + b"}" * 60_000, "schema")


@pytest.mark.parametrize("empty", [b"[]", b"{}"])
def test_text_with_too_many_lists_and_objects_is_refused(empty: bytes) -> None:
    """A bug: 16 MiB of empty lists, and a text with colons, held up all streams for seconds."""
    most = b'{"a": [' + b",".join([empty] * (CONTAINERS_MAX - 2)) + b"]}"

    check_keys(most)
    with pytest.raises(Failure, match="the body has more than 65536 lists and objects: send fewer") as caught:
        check_keys(most.replace(b"[", b"[[],", 1))

    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_brackets_in_strings_are_no_lists() -> None:
    check_keys(b'{"a": "' + rb"[{\"" * CONTAINERS_MAX + b'"}')
