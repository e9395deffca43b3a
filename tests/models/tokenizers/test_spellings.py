"""Spellings: the tokens that a text spells out are found, the first and longest ones."""

import pytest

from services.models.tokenizers.spellings import Spellings, is_blank, one_of_characters

IDS = {"<a>": 1, "<a><b>": 2, "[x": 3, "<": 4}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("a [ x", []),
        ("<a>", [(0, 3, 1)]),
        ("..<a>[x", [(2, 5, 1), (5, 7, 3)]),
        ("<a><b>", [(0, 6, 2)]),
        ("<a><b", [(0, 3, 1), (3, 4, 4)]),
        ("<<a>", [(0, 1, 4), (1, 4, 1)]),
    ],
)
def test_first_and_longest_spelling_counts(text: str, found: list[tuple[int, int, int]]) -> None:
    assert list(Spellings(IDS).find(text)) == found


def test_broken_text_has_a_cut_in_each_spelling() -> None:
    assert Spellings(IDS).broken("..<a>[x.") == ["..<", "a>[", "x."]
    assert Spellings(IDS).broken("plain") == ["plain"]
    assert Spellings({}).broken("<a>") == ["<a>"]


def test_special_characters_of_patterns_stand_for_themselves() -> None:
    pattern = one_of_characters(set("^]-\\"))

    assert [one for one in "^a-b]\\c" if pattern.search(one)] == ["^", "-", "]", "\\"]
    assert one_of_characters(set()).search("anything") is None


@pytest.mark.parametrize(("name", "is_so"), [("\n\n", True), ("▁▁", True), (" ", True), ("▁a", False), ("<s>", False)])
def test_blank_tokens_are_told_from_others(name: str, is_so: bool) -> None:
    assert is_blank(name) == is_so
