"""Losses: which moves count, which workers may have died of a request, and what its client is told in the end."""

import pytest

from services.core.errors import Failure, Reason
from services.core.interface import Delta
from services.frontend.migration.history import AttemptHistory
from services.frontend.migration.recorder import Recorder
from tests.support.doubles import Collected, make_request


class Case:
    """Losses of a request, and the record of what it has delivered."""

    def __init__(self) -> None:
        self.record = Recorder(Collected(), make_request(), None, lambda: None)
        self.losses = AttemptHistory(self.record)

    def deliver(self, token: int) -> None:
        self.record.deliver(Delta(self.record.position, [token]))

    def counts(self) -> tuple[int, int, int]:
        progress = self.losses.progress()
        return progress.moves, progress.free_moves, progress.barren_deaths


LOST = Failure(Reason.DISCONNECTED, "the connection broke")
STILL = Failure(Reason.STALLED, "it stands still")
FULL = Failure(Reason.WORKER_AT_CAPACITY, "full")
LONG = Failure(Reason.WORKER_AT_CAPACITY, "too many tokens wait", metadata={"cause": "queue_tokens"})
NONE_LEFT = Failure(Reason.NO_WORKERS, "nobody")
BAD = Failure(Reason.INVALID_ARGUMENT, "n is 0")


@pytest.mark.parametrize(
    ("failure", "is_timed", "moves", "free_moves"), [(LOST, False, 1, 0), (FULL, False, 0, 1), (FULL, True, 0, 0)]
)
def test_a_refusal_costs_no_move_and_nothing_at_all_where_time_is_the_bound(
    failure: Failure, is_timed: bool, moves: int, free_moves: int
) -> None:
    case = Case()

    case.losses.count(failure, is_timed=is_timed)

    assert case.counts() == (moves, free_moves, 0)


@pytest.mark.parametrize(("has_begun", "deaths"), [(True, 1), (False, 0)])
def test_a_worker_may_have_died_of_what_it_had_begun_with(has_begun: bool, deaths: int) -> None:
    case = Case()

    case.losses.count_death(LOST, has_begun=has_begun)

    assert case.counts() == (0, 0, deaths)


def test_a_worker_that_gave_tokens_has_not_died_of_the_request_nor_had_those_before_it() -> None:
    case = Case()
    case.losses.count_death(LOST, has_begun=True)
    case.losses.begin_attempt()
    case.deliver(7)

    case.losses.count_death(LOST, has_begun=True)

    assert case.counts() == (0, 0, 0)


def test_tokens_of_a_leg_before_count_for_nothing() -> None:
    case = Case()
    case.deliver(7)
    case.losses.begin_attempt()

    case.losses.count_death(LOST, has_begun=True)

    assert case.counts() == (0, 0, 1)


@pytest.mark.parametrize(
    ("counted", "last", "told"),
    [
        ([], LOST, (Reason.DISCONNECTED, "the connection broke")),
        ([LOST], NONE_LEFT, (Reason.DISCONNECTED, "the connection broke; and then: nobody")),
        ([LOST, STILL], NONE_LEFT, (Reason.DISCONNECTED, "the connection broke; and then: nobody")),
        ([LOST], BAD, (Reason.INVALID_ARGUMENT, "n is 0")),
        ([FULL], NONE_LEFT, (Reason.WORKER_AT_CAPACITY, "full")),
        ([FULL, LONG], FULL, (Reason.WORKER_AT_CAPACITY, "too many tokens wait")),
        ([LONG, FULL], NONE_LEFT, (Reason.WORKER_AT_CAPACITY, "too many tokens wait")),
        ([LONG], BAD, (Reason.INVALID_ARGUMENT, "n is 0")),
    ],
)
def test_the_last_word_is_what_cost_the_worker_or_what_only_a_worker_could_know(
    counted: list[Failure], last: Failure, told: tuple[Reason, str]
) -> None:
    case = Case()
    for failure in counted:
        case.losses.count(failure, is_timed=False)

    word = case.losses.final_failure(last)

    assert (word.reason, word.detail) == told
