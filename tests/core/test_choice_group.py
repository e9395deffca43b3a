"""ChoiceGroup: the choices of a request reserve places together, each claims its own, and unclaimed places go back."""

import gc
import weakref
from contextlib import suppress

import pytest

from services.core.choice_group import ChoiceGroup, Reservation
from services.core.errors import Failure, Reason


class Places:
    """Gives out places from 100 on, and records the reservations and the places that were given back."""

    def __init__(self, refusal: Failure | None = None) -> None:
        self.asked: list[int] = []
        self.back: list[int] = []
        self._refusal = refusal

    def reserve(self, count: int) -> Reservation:
        self.asked.append(count)
        if self._refusal is not None:
            raise self._refusal
        return range(100 * len(self.asked), 100 * len(self.asked) + count), self.back.append


def test_the_first_claim_reserves_for_all_choices_and_each_gets_its_own_place_in_any_order() -> None:
    choice_group, places = ChoiceGroup(3, first=5), Places()

    claimed = [choice_group.claim(choice, places.reserve) for choice in (6, 5, 7)]

    assert claimed == [101, 100, 102]
    assert places.asked == [3]


def test_after_a_refusal_every_choice_gets_the_same_failure_as_an_exception_of_its_own() -> None:
    choice_group, places = ChoiceGroup(3), Places(Failure(Reason.WORKER_AT_CAPACITY, "full", metadata={"running": "1"}))
    caught = []

    for choice in range(3):
        with pytest.raises(Failure) as one:
            choice_group.claim(choice, places.reserve)
        caught.append(one.value)

    assert [(failure.reason, failure.metadata) for failure in caught] == [
        (Reason.WORKER_AT_CAPACITY, {"running": "1"})
    ] * 3
    assert len(set(map(id, caught))) == 3
    assert places.asked == [3]


def test_no_place_is_reserved_for_a_choice_that_left_before_the_first_claim() -> None:
    choice_group, places = ChoiceGroup(3), Places()

    choice_group.leave(0)
    claimed = [choice_group.claim(choice, places.reserve) for choice in (1, 2)]

    assert (claimed, places.asked, places.back) == ([100, 101], [2], [])


def test_a_choice_that_leaves_after_the_first_claim_gives_its_place_back_once() -> None:
    choice_group, places = ChoiceGroup(3), Places()
    choice_group.claim(0, places.reserve)

    choice_group.leave(2)
    choice_group.leave(2)

    assert places.back == [102]
    assert choice_group.claim(1, places.reserve) == 101


def test_a_claimed_place_is_not_given_back_when_its_choice_leaves() -> None:
    choice_group, places = ChoiceGroup(2), Places()
    choice_group.claim(0, places.reserve)

    choice_group.leave(0)

    assert places.back == []


@pytest.mark.parametrize("refusal", [None, Failure(Reason.DRAINING, "leaving")])
def test_release_gives_back_unclaimed_places_once(refusal: Failure | None) -> None:
    choice_group, places = ChoiceGroup(3), Places(refusal)
    choice_group.release()
    if refusal is None:
        choice_group.claim(1, places.reserve)
    else:
        with pytest.raises(Failure):
            choice_group.claim(1, places.reserve)

    choice_group.release()
    choice_group.release()

    assert places.back == ([] if refusal else [100, 102])


def test_a_place_is_claimed_once() -> None:
    choice_group, places = ChoiceGroup(1), Places()
    choice_group.claim(0, places.reserve)

    with pytest.raises(KeyError):
        choice_group.claim(0, places.reserve)


def test_a_renewed_group_reserves_again_on_another_worker_and_later_renewals_have_no_effect() -> None:
    choice_group, places = ChoiceGroup(2, worker="w1"), Places(Failure(Reason.WORKER_AT_CAPACITY, "full"))
    with pytest.raises(Failure):
        choice_group.claim(0, places.reserve)

    choice_group.renew("w1")
    elsewhere = Places()
    choice_group.worker = "w2"
    first = choice_group.claim(0, elsewhere.reserve)
    choice_group.renew("w1")

    assert (first, choice_group.claim(1, elsewhere.reserve), choice_group.worker) == (100, 101, "w2")
    assert elsewhere.asked == [2]


def test_a_renewed_group_gives_back_the_places_that_no_choice_has_claimed() -> None:
    """The worker may refuse one choice before the others have claimed their places on it."""
    choice_group, places = ChoiceGroup(3, worker="w1"), Places()
    choice_group.claim(0, places.reserve)

    choice_group.renew("w1")

    assert places.back == [101, 102]


def test_a_refused_group_is_freed_without_the_garbage_collector() -> None:
    def refuse(_: int) -> Reservation:
        raise Failure(Reason.WORKER_AT_CAPACITY, "full")

    choice_group = ChoiceGroup(2)
    freed = weakref.ref(choice_group)
    gc.disable()
    try:
        with suppress(Failure):
            choice_group.claim(0, refuse)
        del choice_group

        assert freed() is None
    finally:
        gc.enable()
