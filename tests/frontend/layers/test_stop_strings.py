"""StopStrings finds the first completed stop string, however the text is split, at a cost that clients cannot raise."""

import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.layers.stop_strings import StopStrings


def test_longer_of_two_strings_that_end_together_is_removed() -> None:
    assert StopStrings(["cd", "bcd"]).feed("abcde") == ("a", True)


def test_cost_of_a_character_does_not_depend_on_the_length_of_a_partial_match() -> None:
    """A bug: each token was compared with every beginning of every string, for tens of milliseconds."""
    stops = StopStrings(["a" * 1023 + chr(0x100 + number) for number in range(64)])
    steps = 0

    def count(frame: Any, event: str, _: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return count

    stops.feed("a" * 1023)
    sys.settrace(count)
    try:
        stops.feed("a" * 100)
    finally:
        sys.settrace(None)

    assert steps < 100 * 64 * 20


def test_strings_that_have_not_begun_cost_a_character_next_to_nothing() -> None:
    """A bug: each of the strings that a code editor sends was matched with each character, so only 16 were allowed."""
    stops = StopStrings(["aX", *(f"{chr(0x100 + number)}b" for number in range(63))])
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_name == "feed"

    sys.setprofile(count)
    try:
        stops.feed("a." * 50)
    finally:
        sys.setprofile(None)

    assert calls == 1 + 100


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3))
def test_result_does_not_depend_on_how_the_text_is_split(text: str, strings: list[str]) -> None:
    _, stopped_at_once = StopStrings(strings).feed(text)
    split, shown = StopStrings(strings), ""

    for character in text:
        part, stopped = split.feed(character)
        shown += part
        if stopped:
            break
    else:
        stopped = False

    assert stopped == stopped_at_once
    if stopped:
        assert not any(string in shown for string in strings)
    else:
        assert shown + split.flush() == text
