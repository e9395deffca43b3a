"""Displacement: when the queue is full, the tenant that holds most gives way to one that holds less."""

from collections.abc import Callable, Hashable, Sequence
from itertools import count

import pytest

from services.worker.fairness import displacement as module
from services.worker.fairness.account import Account, WaitingGroup
from services.worker.fairness.displacement import Holding, displaced_by
from tests.support.tables import rows_of

NUMBERS = count(1)


def account(name: str, *groups: tuple[int, int], weight: float = 1.0, served: int = 0) -> Account:
    """An account whose groups, of so many choices with so many prompt tokens each, wait as `name` 1, 2 and so on."""
    one, keys = Account(name, weight), count(1)
    one.input_tokens = served
    for choices, tokens in groups:
        group = WaitingGroup(next(NUMBERS), tokens)
        for _ in range(choices):
            one.queue[f"{name}{next(keys)}"] = group
            one.waiting_tokens += tokens
    return one


def singles(number: int, tokens: int = 1) -> list[tuple[int, int]]:
    return [(1, tokens)] * number


def displaced(
    newcomer: Account, *others: Account, count: int = 1, tokens: int = 1, places: int = 1, over: int = 0
) -> Sequence[Hashable] | None:
    """What gives way to `count` choices that lack `places`, and room for `over` prompt tokens."""
    waiting = [one for one in (newcomer, *others) if one.queue]
    return displaced_by(Holding(newcomer, count, tokens), places, over, waiting)


TABLE: dict[str, Callable[[], Sequence[Hashable] | None]] = {
    "holds as much as the tenant that holds most, with the newcomer": lambda: displaced(
        account("u", *singles(1)), account("m", *singles(2))
    ),
    "holds less": lambda: displaced(account("u"), account("m", *singles(2)), account("x", *singles(1))),
    "holds less, and still there is no room": lambda: displaced(
        account("u"), account("m", *singles(5)), account("x", *singles(4)), count=4, places=4
    ),
}
EFFECTS = {
    "the newcomer is refused": None,
    "the newest request of the tenant that holds most gives way": ["m2"],
    "the newest request of the tenant that holds most then, and so on": ["m5", "m4", "x4", "m3"],
}


@pytest.mark.parametrize(("who", "what"), rows_of(module))
def test_requests_give_way_as_the_table_in_the_docstring_says(who: str, what: str) -> None:
    assert TABLE[who]() == EFFECTS[what]


def test_tenant_alone_in_the_queue_never_displaces_its_own_requests() -> None:
    assert displaced(account("u", *singles(9))) is None


@pytest.mark.parametrize("held", [0, 1, 2, 3, 4])
def test_two_tenants_do_not_displace_each_other_in_turn(held: int) -> None:
    """Five places are full, however they are divided: at most one of two newcomers displaces a request."""
    ours, theirs = account("a", *singles(held)), account("b", *singles(5 - held))

    assert None in (displaced(ours, theirs), displaced(theirs, ours))


@pytest.mark.parametrize(("weight", "held", "gives_way"), [(3.0, 5, True), (3.0, 4, False), (1.0, 3, True)])
def test_what_is_held_counts_by_weight(weight: float, held: int, gives_way: bool) -> None:
    """The newcomer is its tenant's second request: it holds 1 beyond the first."""
    found = displaced(account("u", *singles(1)), account("m", *singles(held), weight=weight))

    assert found == ([f"m{held}"] if gives_way else None)


def test_first_waiting_request_of_a_tenant_never_gives_way_however_small_its_weight() -> None:
    assert displaced(account("u", *singles(1), weight=1000.0), account("m", (3, 1), weight=0.001)) is None


def test_first_request_of_a_tenant_displaces_others_however_small_its_weight() -> None:
    assert displaced(account("u", weight=0.001), account("m", *singles(2), weight=1000.0)) == ["m2"]


def test_group_gives_way_with_all_its_choices() -> None:
    assert displaced(account("u"), account("m", (1, 1), (3, 1))) == ["m4", "m3", "m2"]


def test_none_gives_way_if_the_newcomer_has_no_room_even_then() -> None:
    """Four places of the two that hold most could be given, and a fifth one could not."""
    others = account("m", *singles(3)), account("x", *singles(3))

    assert displaced(account("u"), *others, count=4, places=4) == ["m3", "x3", "m2", "x2"]
    assert displaced(account("u"), *others, count=5, places=5) is None


def test_of_tenants_that_hold_as_much_the_one_that_has_had_more_gives_way() -> None:
    others = account("m", *singles(2), served=5), account("x", *singles(2), served=6)

    assert displaced(account("u"), *others) == ["x2"]


def test_limit_on_tokens_compares_tokens() -> None:
    """`m` has more requests, `x` more tokens."""
    others = account("m", *singles(9, tokens=1)), account("x", *singles(3, tokens=10))

    assert displaced(account("u"), *others, tokens=4, places=0, over=15) == ["x3", "x2"]


def test_newcomer_with_more_tokens_than_the_others_hold_is_refused() -> None:
    assert displaced(account("u", (1, 5)), account("m", *singles(3)), tokens=4, places=0, over=2) is None


def test_places_and_tokens_can_be_missing_at_once() -> None:
    """The place that is given frees tokens, too."""
    m = account("m", *singles(2, tokens=5))
    x = account("x", *singles(2, tokens=20))

    assert displaced(account("u"), m, x, tokens=5, places=1, over=5) == ["m2"]
    assert displaced(account("u"), m, x, tokens=5, places=1, over=6) == ["m2", "x2"]
