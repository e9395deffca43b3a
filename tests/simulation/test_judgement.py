"""What the faults of a run excuse, and what no fault excuses."""

from dataclasses import replace
from typing import Any

import pytest

from services.worker.server import HANG_UP_S_MAX
from simulation.clients.answer import Answer, Choice, Visit
from simulation.clients.client import DROPPED, HUNG
from simulation.scenario.checker import Checker
from simulation.scenario.drawing import draw_plan
from simulation.scenario.history import REJOIN_S, SETTLE_S, History, Struck
from simulation.scenario.oracle import expected_choice
from simulation.scenario.plan import RECORDS_ENOUGH, SLOTS_ENOUGH, Plan, RequestPlan

REQUEST = RequestPlan(
    number=0, at_s=0.0, frontend=0, prompts=("abc",), max_tokens=5, temperature=0.0, seed=1, is_streamed=True
)
PLAN = replace(
    draw_plan(0),
    workers=2,
    frontends=1,
    slots=SLOTS_ENOUGH,
    places=SLOTS_ENOUGH,
    refusals=0,
    odd_worker=False,
    records_max=RECORDS_ENOUGH,
    requests=(REQUEST,),
    faults=(),
)


def history(*struck: tuple[float, str, str] | tuple[float, str, str, str], plan: Plan = PLAN) -> History:
    """Faults that have struck: when, which, whom and the other end. Each lasts for a second."""
    made = History(plan)
    for at_s, kind, target, *other in struck:
        fault: Any = kind
        made.struck.append(Struck(at_s=at_s, kind=fault, target=target, other="".join(other), duration_s=1.0))
    return made


def answer(**fields: Any) -> Answer:
    expected = expected_choice(REQUEST, 0)
    choice = Choice(list(expected.token_ids), expected.text, expected.finish)
    whole: dict[str, Any] = {
        "choices": [choice],
        "is_complete": True,
        "usage": (3, len(expected.token_ids)),
        "visits": [Visit("frontend-0", False, 10.0, 11.0, "complete")],
    }
    return Answer(**(whole | fields))


def failed(reason: str, loss: str = "") -> Answer:
    visit = Visit("frontend-0", False, 10.0, 11.0, reason, loss)
    return answer(
        choices=[Choice()], is_complete=False, failure=reason or None, visits=[visit], losses=[loss] if loss else []
    )


def problems(given: Answer, made: History, request: RequestPlan = REQUEST) -> list[str]:
    return list(Checker(made._plan, made).check(request, given))


def test_whole_answer_is_right() -> None:
    assert problems(answer(), history()) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"usage": (3, 4)},
        {"usage": None},
        {"choices": [Choice()]},
        {"choices": [Choice([1, 2], "x", "length")]},
        {"is_complete": False},
        {"faults": ["an event follows [DONE]"]},
    ],
    ids=["usage", "no usage", "no tokens", "other tokens", "no end", "a fault of its own"],
)
def test_answer_that_differs_is_wrong_whatever_has_struck(fields: dict[str, Any]) -> None:
    assert problems(answer(**fields), history((10.0, "kill", "worker-0"), (10.0, "kill", "worker-1")))


@pytest.mark.parametrize(
    ("struck", "is_excused"),
    [
        ([], False),
        ([(10.5, "kill", "worker-0")], False),
        ([(10.5, "kill", "worker-0"), (10.6, "freeze", "worker-1")], True),
        ([(2.0, "kill", "worker-0"), (10.5, "kill", "worker-1")], False),
        ([(10.5, "latency", "worker-0", "frontend-0"), (10.5, "latency", "worker-1", "frontend-0")], False),
        ([(10.5, "partition", "worker-0", "frontend-0"), (10.5, "one_way", "frontend-0", "worker-1")], True),
        ([(10.5, "vanish_registry", "registry")], False),
        ([(10.5, "freeze", "frontend-0")], False),
        ([(10.5, "kill", "frontend-0")], True),
        ([(11.5, "kill", "worker-0"), (11.5, "kill", "worker-1")], False),
    ],
)
def test_request_may_lack_workers_only_while_all_of_them_are_away(struck: list[Any], *, is_excused: bool) -> None:
    assert (problems(failed("NO_WORKERS"), history(*struck)) == []) == is_excused


@pytest.mark.parametrize(
    ("struck", "is_excused"),
    [
        ((0.02, "vanish_registry", "registry"), True),
        ((0.02, "freeze_registry", "registry"), True),
        ((0.02, "partition", "registry", "frontend-0"), True),
        ((0.02, "partition", "worker-1", "registry"), True),
        ((0.02, "partition", "registry", "frontend-1"), False),
        ((0.02, "latency", "registry", "frontend-0"), False),
        ((0.02, "partition", "worker-0", "frontend-0"), False),
        ((SETTLE_S, "vanish_registry", "registry"), False),
    ],
)
def test_frontend_may_know_no_workers_only_if_the_registry_was_out_of_its_reach_as_the_plane_came_up(
    struck: Any, *, is_excused: bool
) -> None:
    """Seed 8973: a frontend had no answer of a registry before it vanished."""
    made = history(struck, plan=replace(PLAN, frontends=2))
    soon, later = failed("NO_WORKERS"), failed("NO_WORKERS")
    soon.visits[0].began_s = soon.visits[0].ended_s = 1.5

    assert (problems(soon, made) == []) == is_excused
    assert problems(later, made)


def test_worker_that_was_killed_while_the_registry_is_away_comes_back_after_it() -> None:
    killed, later = (0.0, "kill", "worker-0"), (10.5, "kill", "worker-1")

    assert not history(killed, later).may_lack_workers(10.0, 11.0)
    assert history(killed, (REJOIN_S, "freeze_registry", "registry"), later).may_lack_workers(10.0, 11.0)


def test_request_may_be_lost_after_as_many_moves_as_it_may_make() -> None:
    once = history((10.5, "kill", "worker-0"))

    assert problems(failed("DISCONNECTED"), once)
    assert problems(failed("DISCONNECTED"), once, replace(REQUEST, migration_limit=0)) == []


def test_refusal_for_want_of_room_needs_a_tight_plan_or_requests_of_others() -> None:
    tight = replace(PLAN, slots=1)

    assert problems(failed("OVERLOADED"), history())
    assert problems(failed("OVERLOADED"), history(plan=tight)) == []
    assert problems(failed("OVERLOADED"), history((10.0, "fill", "worker-0"))) == []


@pytest.mark.parametrize(
    ("loss", "struck", "is_excused"),
    [
        (DROPPED, [], True),
        ("reset", [], False),
        ("reset", [(10.5, "kill", "worker-0")], False),
        ("reset", [(10.5, "kill", "frontend-0")], True),
        ("reset", [(10.5, "freeze", "frontend-0")], False),
    ],
)
def test_connection_breaks_only_with_its_frontend(loss: str, struck: list[Any], *, is_excused: bool) -> None:
    assert (problems(failed("", loss), history(*struck)) == []) == is_excused


def test_connection_that_hangs_is_a_fault_of_its_own() -> None:
    hung = failed("", HUNG)
    hung.faults.append("nothing came")

    assert problems(hung, history((10.5, "kill", "frontend-0")))


def test_kept_answer_is_unknown_only_if_its_worker_was_lost_or_it_was_never_there() -> None:
    kept = replace(REQUEST, is_kept=True)
    visits = [Visit("frontend-0", False, 10.0, 10.5, "", DROPPED), Visit("frontend-0", True, 10.6, 11.0)]
    visits[1].ending = "STREAM_NOT_FOUND"
    first = list(expected_choice(REQUEST, 0).token_ids[:1])
    begun = answer(choices=[Choice(first)], is_complete=False, failure="STREAM_NOT_FOUND", visits=visits)

    assert problems(begun, history(), kept)
    assert problems(begun, history((10.2, "kill", "frontend-0")), kept)
    assert problems(begun, history((10.2, "partition", "worker-0", "frontend-0")), kept), "it still has the answer"
    assert problems(begun, history((10.2, "kill", "worker-0")), kept) == []
    begun.choices[0].token_ids.clear()
    assert problems(begun, history(), kept) == []


def test_kept_answer_may_be_unknown_once_its_request_has_failed() -> None:
    kept = replace(REQUEST, is_kept=True)
    visits = [
        Visit("frontend-0", False, 10.0, 10.5, "DISCONNECTED"),
        Visit("frontend-0", True, 10.6, 11.0, "STREAM_NOT_FOUND"),
    ]
    first = list(expected_choice(REQUEST, 0).token_ids[:1])
    lost = answer(choices=[Choice(first)], is_complete=False, failure="STREAM_NOT_FOUND", visits=visits)
    cut_off = history(*((10.2, "partition", worker, "frontend-0") for worker in ("worker-0", "worker-1")))

    assert problems(lost, cut_off, kept) == []


def test_session_with_a_worker_that_leaves_does_not_break_before_its_frontends_had_time_to_hang_up() -> None:
    leaving = history((10.0, "drain", "worker-0"), (10.0, "drain", "frontend-1"))

    assert not leaving.may_break("frontend-0", "worker-0", 10.0 + HANG_UP_S_MAX - 0.1)
    assert leaving.may_break("frontend-0", "worker-0", 10.0 + HANG_UP_S_MAX)
    assert leaving.may_break("frontend-1", "worker-1", 10.0)


def test_session_may_break_only_with_its_worker_or_the_way_to_it() -> None:
    made = history((10.0, "freeze", "frontend-0"), (10.0, "partition", "worker-1", "frontend-1"))

    assert not made.may_break("frontend-0", "worker-0", 10.5)
    assert not made.may_break("frontend-0", "worker-1", 10.5)
    assert made.may_break("frontend-1", "worker-1", 10.5)
    assert not made.may_break("frontend-1", "worker-1", 100.0)
