"""FairQueue: the tenant with the lowest counter is next, and a tenant that returns is lifted."""

from collections.abc import Callable

import pytest

from services.worker.fairness import fair_queue as module
from services.worker.fairness.account import Account
from services.worker.fairness.fair_queue import FairQueue
from tests.support.tables import rows_of


class Case:
    """A queue, and an account for each tenant with the counter that the test gives it."""

    def __init__(self, **counters: int) -> None:
        self.queue = FairQueue()
        self.accounts = {name: Account(name, 1.0) for name in counters}
        for name, counter in counters.items():
            self.accounts[name].input_tokens = counter

    def push(self, *keys: str, tokens: int = 1) -> None:
        """Let single requests wait. The first letter of a key is the tenant."""
        for key in keys:
            self.queue.push(key, self.accounts[key[0]], self.queue.new_group(tokens))

    def pop(self) -> str:
        key, account, group = self.queue.pop()
        account.input_tokens += group.tokens
        assert isinstance(key, str)
        return key

    def pop_all(self) -> list[str]:
        return [self.pop() for _ in range(len(self.queue))]

    def counter(self, name: str) -> float:
        return self.accounts[name].counter


def test_requests_of_one_tenant_leave_in_order_of_arrival() -> None:
    case = Case(a=0)
    case.push("a1", "a2", "a3")

    assert case.pop_all() == ["a1", "a2", "a3"]


def test_tenant_with_the_lowest_counter_is_next() -> None:
    case = Case(a=0, b=0)
    case.push("a1", "a2", "a3", "b1", "b2", tokens=10)

    assert case.pop_all() == ["a1", "b1", "a2", "b2", "a3"]


def test_of_equal_counters_the_request_that_came_first_is_next() -> None:
    case = Case(a=0, b=0)
    case.push("a1", "b1", "a2")
    case.queue.remove("a1")

    assert case.pop_all() == ["b1", "a2"]


def test_tokens_that_leave_the_engine_count_while_a_tenant_waits() -> None:
    case = Case(a=0, b=0)
    case.push("a1", "b1")

    case.accounts["a"].output_tokens += 1

    assert case.pop_all() == ["b1", "a1"]


def test_heavier_tenant_gets_as_many_times_the_service() -> None:
    case = Case(a=0, b=0)
    case.accounts["b"].weight = 3.0
    case.push(*(f"{name}{number}" for number in range(12) for name in "ab"), tokens=6)

    first = [key[0] for key in (case.pop() for _ in range(12))]

    assert (first.count("a"), first.count("b")) == (3, 9)


def test_length_and_tokens_are_those_of_the_requests_that_wait() -> None:
    case = Case(a=0, b=0)
    case.push("a1", "b1", tokens=5)
    assert (len(case.queue), case.queue.tokens) == (2, 10)
    assert "a1" in case.queue

    case.queue.remove("a1")
    case.queue.remove("a1")

    assert "a1" not in case.queue
    assert (len(case.queue), case.queue.tokens, [one.name for one in case.queue.accounts]) == (1, 5, ["b"])


# Lifts


def others_wait(case: Case) -> None:
    """The counters of those that wait are 30 and 50."""
    case.push("b1", "a1")


def nobody_waits(case: Case) -> None:
    """The last that left, with 30 of its own, has had 5 more since."""
    others_wait(case)
    case.queue.remove("a1")
    case.queue.remove("b1")
    case.accounts["b"].input_tokens += 5


SEEN: dict[str, Callable[[], float]] = {}


def seen(event: str) -> Callable[[Callable[[], float]], Callable[[], float]]:
    def add(scenario: Callable[[], float]) -> Callable[[], float]:
        SEEN[event] = scenario
        return scenario

    return add


@seen("it begins to wait, others wait")
def _others_wait() -> float:
    case = Case(a=50, b=30, c=7)
    others_wait(case)
    case.push("c1")
    return case.counter("c")


@seen("it begins to wait, nobody waits")
def _nobody_waits() -> float:
    case = Case(a=50, b=30, c=7)
    nobody_waits(case)
    case.push("c1")
    return case.counter("c")


@seen("it finds a free slot")
def _free_slot() -> float:
    """The tenant that comes next is lifted to the counter of the one that found the slot."""
    case = Case(a=50, b=30, c=7, d=0)
    nobody_waits(case)
    case.queue.pass_through(case.accounts["c"])
    case.accounts["c"].input_tokens += 100
    case.push("d1")
    assert case.counter("d") == case.counter("c")
    return case.counter("c") - 100


@seen("it has requests waiting already")
def _waits_already() -> float:
    case = Case(a=50, b=30, c=7)
    case.push("c1")
    others_wait(case)
    case.push("c2")
    return case.counter("c")


COUNTERS = {
    "is lifted to the lowest counter of those that wait": 30,
    "is lifted to the counter of the last that left the queue": 35,
    "as if it had begun to wait, and had left the queue at once": 35,
    "stays": 7,
}


@pytest.mark.parametrize(("event", "counter"), rows_of(module))
def test_counter_is_lifted_as_the_table_in_the_docstring_says(event: str, counter: str) -> None:
    assert SEEN[event]() == COUNTERS[counter]


def test_higher_counter_is_not_lowered_on_return() -> None:
    case = Case(a=10, b=99)
    case.push("a1", "b1")

    assert case.counter("b") == 99


def test_tenant_that_stayed_away_does_not_get_the_worker_for_itself() -> None:
    """`a` has had much alone; `b` comes back and shares with it from now on."""
    case = Case(a=0, b=0)
    for _ in range(100):
        case.queue.pass_through(case.accounts["a"])
        case.accounts["a"].input_tokens += 10
    case.push("a1", "a2", "a3", "b1", "b2", "b3", tokens=10)

    assert case.pop_all() == ["a1", "b1", "a2", "b2", "a3", "b3"]
