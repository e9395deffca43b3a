"""Roster: what was found without room is not looked at again before there is news of it, and nothing else is lost."""

import random

from services.frontend.roster import Roster
from tests.support import CARD, FakeWorker


def roster_of(*names: str) -> tuple[Roster[FakeWorker], dict[str, FakeWorker]]:
    roster: Roster[FakeWorker] = Roster(CARD)
    workers = {name: FakeWorker(name) for name in names}
    for one in workers.values():
        roster.add(one)
    return roster, workers


def open_in(roster: Roster[FakeWorker]) -> str:
    return "".join(sorted(one.key for one in roster.open))


def test_one_that_is_set_aside_is_there_but_not_open_until_there_is_news_of_it() -> None:
    roster, workers = roster_of("a", "b", "c")

    roster.set_aside(workers["a"])
    assert (open_in(roster), len(roster)) == ("bc", 3)
    roster.on_news(workers["a"])
    assert open_in(roster) == "abc"


def test_both_may_be_said_again() -> None:
    roster, workers = roster_of("a", "b")

    for _ in range(2):
        roster.set_aside(workers["a"])
    assert open_in(roster) == "b"
    for _ in range(2):
        roster.on_news(workers["a"])
    assert open_in(roster) == "ab"


def test_one_that_was_removed_does_not_come_back_by_news() -> None:
    roster, workers = roster_of("a", "b")

    roster.remove(workers["a"])
    roster.on_news(workers["a"])

    assert (open_in(roster), [one.key for one in roster]) == ("b", ["b"])


def test_news_call_whoever_waits() -> None:
    roster, workers = roster_of("a")

    with roster.line.place() as place:
        roster.on_news(workers["a"])
        assert place.is_called
        place.keep(is_room_left=False)
        roster.add(FakeWorker("b"))
        assert place.is_called


def test_holds_what_a_set_would_after_any_history() -> None:
    rng, names = random.Random(3), [str(number) for number in range(10)]
    roster, workers = roster_of(*names)
    here, open_ones = set(names), set(names)

    for _ in range(2_000):
        name = rng.choice(names)
        match rng.choice(["aside", "news", "remove", "add"]):
            case "aside":
                roster.set_aside(workers[name])
                open_ones.discard(name)
            case "news":
                roster.on_news(workers[name])
                open_ones |= {name} & here
            case "remove" if name in here:
                roster.remove(workers[name])
                here.remove(name)
                open_ones.discard(name)
            case "add" if name not in here:
                roster.add(workers[name])
                here.add(name)
                open_ones.add(name)
        assert open_in(roster) == "".join(sorted(open_ones))
        assert {one.key for one in roster} == here
