"""Cursors: a client's place in an answer, in a form that any client can make, checked against the tokens themselves."""

import struct
import zlib
from contextlib import suppress
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.errors import Failure, Reason
from services.core.generation.cursor import CURSOR_CHARACTERS_MAX, Cursor, CursorWriter, checksum_of, parse_cursor
from services.core.validation import ANSWERS_MAX

TOKEN = st.integers(0, 2**32 - 1)
DELTAS = st.lists(st.lists(TOKEN, max_size=5), max_size=6)
"""The tokens of one choice, delta by delta."""
CHOICES = st.lists(st.tuples(DELTAS, st.booleans(), st.integers(0, 1000)), min_size=1, max_size=5)
"""For each choice: its deltas, whether its end has been delivered, and how many tokens its client had brought."""


def plain_checksum(choices: list[list[int]]) -> int:
    """The checksum as the module's docstring defines it."""
    each = [zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids)) for token_ids in choices]
    return each[0] if len(each) == 1 else zlib.crc32(struct.pack(f"<{len(each)}I", *each))


def written(choices: list[tuple[list[list[int]], bool, int]]) -> CursorWriter:
    writer = CursorWriter(len(choices))
    for choice, (deltas, has_ended, brought) in enumerate(choices):
        starts = accumulate(map(len, deltas), initial=brought)
        for position, token_ids in zip(starts, [*deltas, []], strict=True):
            writer.add(choice, position, token_ids, is_end=False)
        if has_ended:
            writer.add(choice, brought + sum(map(len, deltas)), (), is_end=True)
    return writer


@given(CHOICES)
def test_what_is_written_is_parsed_as_it_was(choices: list[tuple[list[list[int]], bool, int]]) -> None:
    writer = written(choices)

    cursor = parse_cursor(writer.text, "cursor")

    assert cursor.positions == tuple(brought + sum(map(len, deltas)) for deltas, _, brought in choices)
    assert cursor.positions == tuple(writer.position(choice) for choice in range(len(choices)))
    assert cursor.ended == tuple(has_ended for _, has_ended, _ in choices)
    assert cursor.checksum == writer.checksum


@given(CHOICES)
def test_checksum_is_that_of_the_definition_however_the_tokens_were_cut(
    choices: list[tuple[list[list[int]], bool, int]],
) -> None:
    token_ids = [[token for delta in deltas for token in delta] for deltas, _, _ in choices]

    assert written(choices).checksum == plain_checksum(token_ids)


@given(st.permutations(range(6)))
def test_checksum_does_not_depend_on_the_order_in_which_choices_are_delivered(order: list[int]) -> None:
    writer = CursorWriter(2)
    positions = [0, 0]

    for number in order:
        choice = number % 2
        writer.add(choice, positions[choice], [positions[choice]], is_end=False)
        positions[choice] += 1

    assert writer.checksum == plain_checksum([[0, 1, 2], [0, 1, 2]])


def test_an_answer_of_which_nothing_has_been_delivered() -> None:
    assert CursorWriter(1).text == "0-00000000"
    assert CursorWriter(2).text == f"0.0-{plain_checksum([[], []]):08x}"


def test_a_known_cursor_for_authors_of_clients() -> None:
    writer = CursorWriter(2)
    writer.add(0, 0, [1, 2, 3], is_end=False)
    writer.add(1, 0, [4], is_end=True)

    assert writer.text == f"3.1e-{writer.checksum:08x}"
    assert writer.checksum == zlib.crc32(
        zlib.crc32(b"\1\0\0\0\2\0\0\0\3\0\0\0").to_bytes(4, "little") + zlib.crc32(b"\4\0\0\0").to_bytes(4, "little")
    )


def test_checksum_of_one_choice_is_its_own() -> None:
    assert checksum_of([7]) == 7
    assert checksum_of([7, 8]) != checksum_of([8, 7])


@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "0",
        "-00000000",
        "12-5ad1c2f",
        "12-5ad1c2f01",
        "12-5AD1C2F0",
        "12e-",
        "e-5ad1c2f0",
        "12ee-5ad1c2f0",
        ".12-5ad1c2f0",
        "12.-5ad1c2f0",
        "-1-5ad1c2f0",
        "1.5-5ad1c2f0 ",
        " 12-5ad1c2f0",
        "12-5ad1c2f0\n",
        "12345678901-5ad1c2f0",
        "\u0661\u0662-5ad1c2f0",
        "1²-5ad1c2f0",
        "12-5ad1c2f0,13-00000000",
        "0." * 100_000 + "0-5ad1c2f0",
    ],
    ids=range(20),
)
def test_anything_else_is_refused_by_the_name_of_what_carries_it(hostile: str) -> None:
    """A bug: digits of other scripts were taken for digits."""
    with pytest.raises(Failure) as caught:
        parse_cursor(hostile, "Last-Event-ID")

    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "Last-Event-ID")
    assert "Last-Event-ID" in caught.value.detail


@given(st.text(max_size=40))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    with suppress(Failure):
        assert isinstance(parse_cursor(text, "cursor"), Cursor)


def test_the_largest_cursor_can_be_sent_back() -> None:
    largest = ".".join(["4294967295e"] * ANSWERS_MAX) + "-ffffffff"

    assert len(largest) <= CURSOR_CHARACTERS_MAX
    assert len(parse_cursor(largest, "cursor").positions) == ANSWERS_MAX
