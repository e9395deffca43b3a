"""Policy: whether and where a request moves, as functions of values. The tables in the docstrings are walked here."""

from dataclasses import replace
from itertools import product

import msgspec
import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.model_card import Resume
from services.core.request import Guided, GuidedKind, Request, Sampling
from services.frontend.migration.policy import (
    FREE_MOVES_MAX,
    LAG_TOKENS_MAX,
    ROUNDS_MAX,
    Placement,
    Policy,
    Progress,
    ResumeSampling,
    Verdict,
    Wait,
    is_move,
    judge_second,
    may_replace_second,
    next_placement,
    policy_for,
)
from tests.support.doubles import CARD, make_request

BEGINNING = Progress(moves=0, free_moves=0, delivered=0, is_tracked=True)
BEGUN = replace(BEGINNING, delivered=5)
LOST = (
    Reason.CANNOT_CONNECT,
    Reason.DISCONNECTED,
    Reason.STALLED,
    Reason.STREAM_INCOMPLETE,
    Reason.PROTOCOL_VIOLATION,
    Reason.ENGINE_DEAD,
)
FREE = (Reason.WORKER_AT_CAPACITY, Reason.DRAINING)


def may(reason: Reason, progress: Progress, *, limit: int = 3, can_resume: bool = True) -> bool:
    return Policy(limit, can_resume).may_migrate(Failure(reason, "x"), progress)


@pytest.mark.parametrize("reason", LOST)
def test_a_request_moves_from_lost_workers_up_to_the_limit(reason: Reason) -> None:
    assert may(reason, replace(BEGUN, moves=2))
    assert not may(reason, replace(BEGUN, moves=3))
    assert not may(reason, BEGINNING, limit=0)


@pytest.mark.parametrize("reason", FREE)
def test_moves_after_refusals_are_free_up_to_free_moves_max(reason: Reason) -> None:
    assert may(reason, replace(BEGUN, moves=9, free_moves=FREE_MOVES_MAX - 1))
    assert not may(reason, replace(BEGUN, free_moves=FREE_MOVES_MAX))


@pytest.mark.parametrize("reason", FREE)
def test_with_a_limit_of_0_a_refused_request_may_start_elsewhere_but_not_continue_there(reason: Reason) -> None:
    assert may(reason, BEGINNING, limit=0)
    assert not may(reason, BEGUN, limit=0)


def test_after_an_engine_error_a_request_is_retried_once_and_only_from_the_start() -> None:
    assert may(Reason.ENGINE_ERROR, BEGINNING)
    assert not may(Reason.ENGINE_ERROR, replace(BEGINNING, moves=1))
    assert not may(Reason.ENGINE_ERROR, BEGUN)
    assert not may(Reason.ENGINE_ERROR, BEGINNING, limit=0)


@pytest.mark.parametrize("reason", sorted(set(Reason) - {*LOST, *FREE, Reason.ENGINE_ERROR}))
def test_other_failures_cause_no_move(reason: Reason) -> None:
    assert not may(reason, BEGINNING)


def test_an_answer_that_is_not_tracked_or_cannot_be_resumed_does_not_move() -> None:
    assert not may(Reason.DISCONNECTED, replace(BEGUN, is_tracked=False))
    assert may(Reason.DISCONNECTED, replace(BEGINNING, is_tracked=False))
    assert not may(Reason.DISCONNECTED, BEGUN, can_resume=False)
    assert may(Reason.DISCONNECTED, BEGINNING, can_resume=False)


@pytest.mark.parametrize(
    ("frontend", "worker", "client", "lowest"), [(3, None, None, 3), (3, 1, None, 1), (3, None, 0, 0), (1, 5, 9, 1)]
)
def test_the_limit_is_the_lowest_of_frontend_worker_and_client(
    frontend: int, worker: int | None, client: int | None, lowest: int
) -> None:
    call = Call(request_id="r", migration_limit=client)

    assert policy_for(make_request(), call, CARD, frontend, worker).limit == lowest


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (make_request(sampling=Sampling(temperature=0.5, seed=1)), "sampling"),
        (make_request(sampling=Sampling(temperature=0.0, seed=1, presence_penalty=1.0)), "penalties"),
        (make_request(guided=Guided(GuidedKind.JSON_OBJECT)), "guided"),
        (make_request(logprobs=0), "logprobs"),
    ],
    ids=["a client's seed", "penalties", "a form", "log probabilities"],
)
def test_a_request_with_state_that_the_engine_cannot_resume_exactly_is_not_resumed(
    request_: Request, what: str
) -> None:
    able = Resume(sampling=True, penalties=True, guided=True, logprobs=True)
    call = Call(request_id="r")

    assert policy_for(request_, call, replace(CARD, resume=able), 3, None).can_resume
    assert not policy_for(request_, call, replace(CARD, resume=replace(able, **{what: False})), 3, None).can_resume
    assert policy_for(make_request(), call, replace(CARD, resume=replace(able, **{what: False})), 3, None).can_resume


LOSSES = {"penalties": Sampling(temperature=0.5, presence_penalty=1.0), "nothing": Sampling(temperature=0.5)}
YES_NO: dict[bool, str] = {True: "yes", False: "no"}


@pytest.mark.parametrize("resume_sampling", ["exact", "prefix"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("draws", ["greedy, or by a seed", "its own"])
@pytest.mark.parametrize("has_seed", [True, False])
def test_how_an_engine_continues_is_as_the_table_says(
    loss: str, draws: str, has_seed: bool, resume_sampling: ResumeSampling
) -> None:
    sampling = msgspec.structs.replace(LOSSES[loss], seed=1 if has_seed else None)
    card = replace(CARD, resume=Resume(sampling=draws != "its own", penalties=False))
    of_table = "penalties, a form or log probabilities" if loss == "penalties" else loss
    row = matching(rows_of(policy_for), of_table, draws, YES_NO[has_seed], resume_sampling)

    policy = policy_for(make_request(sampling=sampling), Call(request_id="r"), card, 3, None, resume_sampling)

    assert YES_NO[policy.can_resume] == row[4]
    assert row[5] in (YES_NO[policy.is_exact], "–")


def test_greedy_answers_of_an_engine_without_seeds_continue_exactly() -> None:
    card = replace(CARD, resume=Resume(sampling=False))

    policy = policy_for(make_request(sampling=Sampling(temperature=0.0)), Call(request_id="r"), card, 3, None, "exact")

    assert (policy.can_resume, policy.is_exact) == (True, True)


@pytest.mark.parametrize(("is_exact", "progress", "may"), [(True, BEGUN, True), (False, BEGUN, False)])
def test_attempts_with_draws_of_their_own_do_not_run_beside_one_that_delivers(
    is_exact: bool, progress: Progress, may: bool
) -> None:
    policy = Policy(3, can_resume=True, is_exact=is_exact)

    assert (policy.may_join(progress), policy.may_prepare(progress)) == (may, may)
    assert policy.may_join(BEGINNING)
    assert policy.may_resume(progress)


def test_a_request_is_poison_after_two_workers_in_a_row_died_without_a_token() -> None:
    policy = Policy(3, can_resume=True)

    assert policy.is_poison(replace(BEGUN, barren_deaths=2))
    assert not policy.is_poison(replace(BEGUN, barren_deaths=1))


@pytest.mark.parametrize(("limit", "progress", "may"), [(1, BEGINNING, True), (0, BEGINNING, False), (1, BEGUN, False)])
def test_a_second_attempt_is_prepared_if_it_may_move_and_take_over(limit: int, progress: Progress, may: bool) -> None:
    assert Policy(limit, can_resume=False).may_prepare(progress) == may


def rows_of(function: object) -> list[list[str]]:
    """The table in a function's docstring, without its head."""
    lines = [line.strip() for line in (function.__doc__ or "").splitlines()]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def matching(rows: list[list[str]], *cells: str) -> list[str]:
    """The first row whose leading cells are these; a dash stands for any."""
    return next(row for row in rows if all(has in ("–", wanted) for has, wanted in zip(row, cells, strict=False)))


@pytest.mark.parametrize(("reason", "was_accepted"), list(product((*LOST, *FREE, Reason.ENGINE_ERROR), (False, True))))
def test_the_table_says_where_the_next_attempt_goes(reason: Reason, was_accepted: bool) -> None:
    rows = rows_of(next_placement)
    failure = str(reason) if reason in {row[0] for row in rows} else "any other"
    _, _, worker, wait, _ = matching(rows, failure, "yes" if was_accepted else "no")

    placement = next_placement(Failure(reason, "x"), was_accepted=was_accepted)

    assert placement == Placement(worker == "excluded", Wait[wait])


@pytest.mark.parametrize(
    ("has_finished", "may_join", "lag", "rounds_left"),
    list(product((True, False), (True, False), (0, LAG_TOKENS_MAX, LAG_TOKENS_MAX + 1), (0, 1, ROUNDS_MAX))),
)
def test_the_table_says_whether_a_second_attempt_takes_over(
    has_finished: bool, may_join: bool, lag: int, rounds_left: int
) -> None:
    yes_no = ["yes" if one else "no" for one in (has_finished, may_join)]
    distance = "> LAG_TOKENS_MAX" if lag > LAG_TOKENS_MAX else "≤ LAG_TOKENS_MAX"
    expected = matching(rows_of(judge_second), *yes_no, distance, "> 0" if rounds_left else "0")[4]

    verdict = judge_second(has_first_finished=has_finished, may_join=may_join, lag=lag, rounds_left=rounds_left)

    assert verdict is Verdict[expected]


@pytest.mark.parametrize(
    ("wait", "deadline", "expected"),
    [
        (Wait.AS_BEFORE, None, None),
        (Wait.AS_BEFORE, 5.0, 5.0),
        (Wait.ONE_PERIOD, None, 9.0),
        (Wait.ONE_PERIOD, 5.0, 5.0),
        (Wait.NEW_PERIOD, None, 9.0),
        (Wait.NEW_PERIOD, 5.0, 9.0),
    ],
)
def test_a_placement_sets_the_deadline_of_the_next_attempt(
    wait: Wait, deadline: float | None, expected: float | None
) -> None:
    call = Call(request_id="r", replacement_deadline=deadline)

    assert Placement(True, wait).apply(call, "a#1", new_deadline=9.0).replacement_deadline == expected


@pytest.mark.parametrize(
    ("excludes_worker", "worker", "excluded"),
    [(True, "a#1", {"b#2", "a#1"}), (False, "a#1", {"b#2"}), (True, None, {"b#2"})],
)
def test_a_placement_excludes_the_worker_if_the_failed_attempt_had_one(
    excludes_worker: bool, worker: str | None, excluded: set[str]
) -> None:
    call = Call(request_id="r", excluded=frozenset({"b#2"}))

    assert Placement(excludes_worker, Wait.AS_BEFORE).apply(call, worker, new_deadline=9.0).excluded == excluded


@pytest.mark.parametrize(
    ("reason", "delivered", "expected"),
    [
        (Reason.DISCONNECTED, 0, True),
        (Reason.DISCONNECTED, 5, True),
        (Reason.ENGINE_ERROR, 0, True),
        (Reason.DRAINING, 0, False),
        (Reason.DRAINING, 5, True),
        (Reason.WORKER_AT_CAPACITY, 0, False),
        (Reason.WORKER_AT_CAPACITY, 5, False),
    ],
)
def test_refusals_and_workers_that_leave_without_a_token_are_not_reported_as_moves(
    reason: Reason, delivered: int, expected: bool
) -> None:
    assert is_move(Failure(reason, "x"), delivered) == expected


@pytest.mark.parametrize(
    ("reason", "rounds_left", "expected"),
    [(Reason.STALLED, 1, True), (Reason.STALLED, 0, False), (Reason.NO_WORKERS, 1, False)],
)
def test_a_failed_second_attempt_is_replaced_while_rounds_are_left_and_another_worker_may_help(
    reason: Reason, rounds_left: int, expected: bool
) -> None:
    assert may_replace_second(Failure(reason, "x"), rounds_left) == expected
