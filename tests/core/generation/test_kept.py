"""What the choices of one kept answer share: its id, whether it was found, and the records that wait for its end."""

from collections.abc import Callable

import pytest

from services.core.generation.kept import EPOCH_BITS, ID_BYTES, RANDOM_ID, Copy, Generation, scoped_id
from services.core.tenant import EVERYBODY, TENANT_NAME_CHARACTERS_MAX, Tenant


def make() -> Generation:
    return Generation(bytes(range(16)), 30.0, is_told=True)


def test_its_name_is_its_id_in_hexadecimal() -> None:
    assert make().name == "000102030405060708090a0b0c0d0e0f"


def test_workers_know_the_same_id_of_two_tenants_apart() -> None:
    """A bug: no name could have more than 64 characters."""
    names = ["acme", "other", "a" * TENANT_NAME_CHARACTERS_MAX]
    one = bytes(range(ID_BYTES))

    scoped = [scoped_id(one, tenant) for tenant in (EVERYBODY, *(Tenant(name=name) for name in names))]

    assert scoped[0] == one, "without keys all is as before"
    assert len(set(scoped)) == 4
    assert {len(each) for each in scoped} == {ID_BYTES}


@pytest.mark.parametrize("resumes", [0, 1, 5])
def test_request_that_repeats_an_id_comes_later_than_the_answer_before_it_and_its_resumes(
    resumes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter([1_800_000_000.0, 1_800_000_000.1])
    monkeypatch.setattr("services.core.generation.kept.time.time", lambda: next(times_s))
    first, second = [Generation(b"a" * 16, 1.0, is_told=True) for _ in range(2)]
    greatest_of_a_resume = ((first.epoch >> EPOCH_BITS) + resumes << EPOCH_BITS) + 2**EPOCH_BITS - 1

    assert first.epoch <= greatest_of_a_resume < second.epoch < 2**63


def test_records_are_let_go_of_once_and_in_order() -> None:
    generation, let_go = make(), list[int]()
    for number in range(3):
        generation.hold(lambda number=number: let_go.append(number))  # type: ignore[misc]
    assert let_go == []

    generation.release()
    generation.release()

    assert let_go == [0, 1, 2]


def test_what_is_held_while_records_are_let_go_of_waits_for_the_next_time() -> None:
    generation, let_go = make(), list[str]()

    def again() -> None:
        let_go.append("first")
        generation.hold(lambda: let_go.append("second"))

    generation.hold(again)
    generation.release()
    assert let_go == ["first"]

    generation.release()

    assert let_go == ["first", "second"]


# Records that are not needed once tokens of another have come


class Records:
    """Records that say when they are discarded."""

    def __init__(self) -> None:
        self.discarded: list[str] = []

    def discard(self, name: str) -> Callable[[], None]:
        return lambda: self.discarded.append(name)

    def copy(self, name: str) -> Copy:
        return Copy(session=name, token_count=0, is_over=False, discard=self.discard(name))


def test_best_record_is_taken_and_the_others_are_discarded_once_tokens_of_it_have_come() -> None:
    generation, records = make(), Records()
    generation.copies = {0: [records.copy(name) for name in "abc"], 1: [records.copy("d")]}

    taken = generation.take_copy(0)
    assert (taken and taken.session, records.discarded) == ("a", [])

    generation.drop_others(0)
    generation.drop_others(0)

    assert records.discarded == ["b", "c"]
    assert generation.take_copy(0) is None
    assert generation.copies.keys() == {1}


def test_record_left_on_a_lost_worker_is_discarded_once_the_choice_goes_on_elsewhere() -> None:
    generation, records = make(), Records()
    generation.leave(0, "a", records.discard("a"))
    generation.leave(1, "b", records.discard("b"))

    generation.drop_others(0)
    generation.drop_others(0)

    assert records.discarded == ["a"]


def test_record_left_on_a_worker_is_not_discarded_once_the_choice_is_there_again() -> None:
    generation, records = make(), Records()
    generation.leave(0, "a", records.discard("a"))
    generation.leave(0, "b", records.discard("b"))

    generation.return_to(0, "a")
    generation.return_to(7, "a")
    generation.drop_others(0)

    assert records.discarded == ["b"]


@pytest.mark.parametrize(
    ("given", "has_room"),
    [
        ("0123456789abcdef0123456789ABCDEF", True),
        ("01234567-89ab-cdef-0123-456789ABCDEF", True),
        ("01234567-89ab-cdef-0123456789abcdef", False),
        ("0123456789abcdef0123456789abcde", False),
        ("0123456789abcdef0123456789abcdef0", False),
        ("0123456789abcdef0123456789abcdeg", False),
        ("{01234567-89ab-cdef-0123-456789abcdef}", False),
        ("urn:uuid:01234567-89ab-cdef-0123-456789abcdef", False),
        ("٠123456789abcdef0123456789abcdef", False),
        ("", False),
    ],
)
def test_ids_with_room_for_128_random_bits_are_hexadecimal_or_uuids(given: str, has_room: bool) -> None:
    assert (RANDOM_ID.fullmatch(given) is not None) is has_room
