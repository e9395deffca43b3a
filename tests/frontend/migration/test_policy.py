"""Policy: whether a request may move, as a function of values."""

from dataclasses import replace

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.model_card import Resume
from services.core.request import Guided, GuidedKind, Request, Sampling
from services.frontend.migration.policy import FREE_MOVES_MAX, Policy, Progress, policy_for
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
def test_a_lost_worker_may_be_left_up_to_the_limit(reason: Reason) -> None:
    assert may(reason, replace(BEGUN, moves=2))
    assert not may(reason, replace(BEGUN, moves=3))
    assert not may(reason, BEGINNING, limit=0)


@pytest.mark.parametrize("reason", FREE)
def test_a_refusal_is_free_but_not_for_ever(reason: Reason) -> None:
    assert may(reason, replace(BEGUN, moves=9, free_moves=FREE_MOVES_MAX - 1))
    assert not may(reason, replace(BEGUN, free_moves=FREE_MOVES_MAX))


@pytest.mark.parametrize("reason", FREE)
def test_with_a_limit_of_0_a_refused_request_may_start_elsewhere_but_a_begun_one_stays(reason: Reason) -> None:
    assert may(reason, BEGINNING, limit=0)
    assert not may(reason, BEGUN, limit=0)


def test_an_engine_error_may_be_tried_once_elsewhere_and_only_from_the_start() -> None:
    assert may(Reason.ENGINE_ERROR, BEGINNING)
    assert not may(Reason.ENGINE_ERROR, replace(BEGINNING, moves=1))
    assert not may(Reason.ENGINE_ERROR, BEGUN)
    assert not may(Reason.ENGINE_ERROR, BEGINNING, limit=0)


@pytest.mark.parametrize("reason", sorted(set(Reason) - {*LOST, *FREE, Reason.ENGINE_ERROR}))
def test_nothing_else_moves(reason: Reason) -> None:
    assert not may(reason, BEGINNING)


def test_an_answer_that_is_not_tracked_or_cannot_be_resumed_stays() -> None:
    assert not may(Reason.DISCONNECTED, replace(BEGUN, is_tracked=False))
    assert may(Reason.DISCONNECTED, replace(BEGINNING, is_tracked=False))
    assert not may(Reason.DISCONNECTED, BEGUN, can_resume=False)
    assert may(Reason.DISCONNECTED, BEGINNING, can_resume=False)


@pytest.mark.parametrize(
    ("frontend", "worker", "client", "lowest"), [(3, None, None, 3), (3, 1, None, 1), (3, None, 0, 0), (1, 5, 9, 1)]
)
def test_the_lowest_limit_counts(frontend: int, worker: int | None, client: int | None, lowest: int) -> None:
    card = replace(CARD, migration_limit=worker)
    call = Call(request_id="r", migration_limit=client)

    assert policy_for(make_request(), call, card, frontend).limit == lowest


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (make_request(sampling=Sampling(temperature=0.5, seed=1)), "sampling"),
        (make_request(sampling=Sampling(temperature=0.0, seed=1, presence_penalty=1.0)), "penalties"),
        (make_request(guided=Guided(GuidedKind.JSON_OBJECT)), "guided"),
        (make_request(logprobs=0), "logprobs"),
    ],
)
def test_what_an_engine_cannot_resume_exactly_is_not_resumed(request_: Request, what: str) -> None:
    able = Resume(sampling=True, penalties=True, guided=True, logprobs=True)
    call = Call(request_id="r")

    assert policy_for(request_, call, replace(CARD, resume=able), 3).can_resume
    assert not policy_for(request_, call, replace(CARD, resume=replace(able, **{what: False})), 3).can_resume
    assert policy_for(make_request(), call, replace(CARD, resume=replace(able, **{what: False})), 3).can_resume


def test_two_workers_in_a_row_that_died_before_a_token_are_poison() -> None:
    policy = Policy(3, can_resume=True)

    assert policy.is_poison(replace(BEGUN, barren_deaths=2))
    assert not policy.is_poison(replace(BEGUN, barren_deaths=1))
