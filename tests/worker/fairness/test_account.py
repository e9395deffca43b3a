"""Account: a tenant's counter is its service by weight, and its queue is first come, first served."""

import pytest

from services.worker.fairness.account import Account, WaitingGroup


def account(weight: float = 1.0, input_tokens: int = 0, output_tokens: int = 0) -> Account:
    one = Account("a", weight)
    one.input_tokens, one.output_tokens = input_tokens, output_tokens
    return one


@pytest.mark.parametrize(("weight", "counter"), [(1.0, 16.0), (4.0, 4.0), (0.5, 32.0)])
def test_counter_is_prompt_tokens_and_twice_the_output_tokens_divided_by_the_weight(
    weight: float, counter: float
) -> None:
    assert account(weight, input_tokens=10, output_tokens=3).counter == counter


@pytest.mark.parametrize(("floor", "counter"), [(9.0, 10.0), (10.0, 10.0), (12.0, 12.0)])
def test_lift_raises_a_lower_counter_and_leaves_a_higher_one(floor: float, counter: float) -> None:
    lifted = account(input_tokens=10)

    lifted.lift(floor)

    assert lifted.counter == counter
    lifted.output_tokens += 1
    assert lifted.counter == counter + 2


def test_new_weight_holds_for_the_service_to_come() -> None:
    changed = account(weight=1.0, input_tokens=10)

    changed.reweigh(5.0)

    assert changed.counter == 10.0
    changed.input_tokens += 10
    assert changed.counter == 12.0


def test_newest_requests_and_the_first_one_are_found_with_all_their_choices() -> None:
    one, pair, single = account(), WaitingGroup(1, tokens=5), WaitingGroup(2, tokens=3)
    one.queue.update({"p1": pair, "p2": pair, "s": single})

    assert list(one.newest_first()) == [["s"], ["p2", "p1"]]
    assert (one.first, one.first_count) == (pair, 2)
