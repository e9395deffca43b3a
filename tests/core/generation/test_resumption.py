"""Resumption: a client gets exactly what it does not have, and nothing if its cursor does not fit the answer."""

import zlib
from array import array
from collections.abc import Sequence

import pytest

from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor, CursorWriter, parse_cursor
from services.core.generation.resumption import Resumption, bases_of
from services.core.interface import Delta, Usage
from services.core.request import FinishReason, Request

TOKENS = [[7, 8, 9], [5, 6]]


def token(choice: int, position: int, *ids: int) -> Delta:
    return Delta(position, ids or (TOKENS[choice][position],), choice=choice)


def end(choice: int, position: int, *, is_last: bool = False) -> Delta:
    usage = Usage(2, position) if is_last else None
    return Delta(position, (), choice=choice, finish_reason=FinishReason.STOP, usage=usage)


def cursor(*ends: tuple[int, bool]) -> Cursor:
    """The cursor of a client that has so many tokens of each choice, and whether it has the end."""
    writer = CursorWriter(len(ends))
    for choice, (count, is_ended) in enumerate(ends):
        writer.add(choice, 0, TOKENS[choice][:count], is_end=is_ended)
    return parse_cursor(writer.text, "cursor")


def taken(resumption: Resumption, *deltas: Delta) -> list[list[Delta]]:
    return [list(resumption.take(delta)) for delta in deltas]


def failure_of(resumption: Resumption, *deltas: Delta) -> Reason:
    with pytest.raises(Failure) as caught:
        taken(resumption, *deltas)
    assert taken(resumption, *deltas) == [[]] * len(deltas), "nothing follows a failure"
    return caught.value.reason


def test_only_what_follows_the_cursor_is_passed_on() -> None:
    third, last = token(0, 2), end(0, 3, is_last=True)

    sent = taken(Resumption(cursor((2, False)), [0]), token(0, 0), token(0, 1), third, last)

    assert sent == [[], [], [third], [last]]


def test_what_follows_waits_until_every_choice_has_come_up_to_the_cursor() -> None:
    third, last = token(0, 2), end(1, 2, is_last=True)
    resumption = Resumption(cursor((2, False), (1, False)), [0, 0])

    sent = taken(resumption, token(0, 0), token(0, 1), third, end(0, 3), token(1, 0), token(1, 1), last)

    assert sent == [[], [], [], [], [third, end(0, 3)], [token(1, 1)], [last]]


def test_what_follows_waits_for_the_end_that_the_client_has() -> None:
    resumption = Resumption(cursor((3, True), (0, False)), [0, 0])

    sent = taken(resumption, token(1, 0), token(0, 0), token(0, 1), token(0, 2), end(0, 3), token(1, 1))

    assert sent == [[], [], [], [], [token(1, 0)], [token(1, 1)]]


def test_client_that_has_all_gets_nothing() -> None:
    sent = taken(Resumption(cursor((3, True)), [0]), token(0, 0, 7, 8, 9), end(0, 3, is_last=True))

    assert sent == [[], []]


def test_client_with_a_cursor_at_the_beginning_gets_all() -> None:
    assert taken(Resumption(cursor((0, False)), [0]), token(0, 0)) == [[token(0, 0)]]


def test_all_is_new_once_every_choice_has_come_up_to_the_cursor() -> None:
    resumption = Resumption(cursor((2, False), (1, False)), [0, 0])

    past = []
    for delta in (token(0, 0), token(0, 1), token(1, 0), token(1, 1)):
        resumption.take(delta)
        past.append(resumption.is_past)

    assert past == [False, False, True, True]


def test_choice_that_the_client_has_complete_is_watched_until_the_end() -> None:
    resumption = Resumption(cursor((1, True), (0, False)), [0, 0])

    taken(resumption, token(0, 0), end(0, 1))

    assert not resumption.is_past
    assert failure_of(resumption, token(0, 1)) is Reason.RESUME_DIVERGED


def test_tokens_that_the_client_had_sent_itself_are_not_in_the_checksum() -> None:
    checksum = zlib.crc32(array("I", [9]).tobytes())
    resumption = Resumption(parse_cursor(f"3-{checksum:08x}", "cursor"), [2])

    assert taken(resumption, token(0, 2), end(0, 3)) == [[], [end(0, 3)]]


@pytest.mark.parametrize(
    ("client", "deltas"),
    [
        (cursor((2, False)), [token(0, 0), token(0, 1, 99)]),
        (cursor((2, True)), [token(0, 0), token(0, 1), token(0, 2)]),
        (cursor((2, False), (1, False)), [token(0, 0)]),
    ],
    ids=["other tokens", "no end there", "another number of choices"],
)
def test_cursor_of_another_answer_is_refused(client: Cursor, deltas: Sequence[Delta]) -> None:
    assert failure_of(Resumption(client, [0]), *deltas) is Reason.RESUME_DIVERGED


@pytest.mark.parametrize("is_ended", [True, False])
def test_cursor_beyond_the_end_is_refused(*, is_ended: bool) -> None:
    deltas = [token(0, 0), token(0, 1), end(0, 2, is_last=True)]

    assert failure_of(Resumption(cursor((3, is_ended)), [0]), *deltas) is Reason.CURSOR_BEYOND_END


def test_cursor_that_has_more_of_a_choice_than_will_come_is_refused_with_the_last_delta() -> None:
    """Nothing comes of a choice that the client had complete, so no delta of its own refutes the cursor."""
    resumption = Resumption(cursor((2, False), (1, False)), [0, 0])

    assert failure_of(resumption, token(0, 0), token(0, 1), end(0, 2, is_last=True)) is Reason.CURSOR_BEYOND_END


def test_bases_are_what_the_client_has_sent_of_each_choice_of_each_prompt() -> None:
    parts = tuple(
        Request(model="m", token_ids=(1,), n=2).continued(brought) for brought in (((1, 2), None), ((), (3,)))
    )

    assert bases_of(Request(model="m", parts=parts, n=2)) == [2, 0, 0, 1]
    assert bases_of(Request(model="m", text="x", generated_token_ids=(4,))) == [1]
