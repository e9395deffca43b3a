"""AttemptHistory: which moves count, which workers may have died of a request, and which failure its client gets."""

import pytest

from services.core.errors import Failure, Reason
from services.core.interface import Delta
from services.frontend.migration.history import AttemptHistory
from services.frontend.migration.recorder import Recorder
from tests.support.doubles import Collected, make_request


class Case:
    """The history of a request, and the record of its delivered tokens."""

    def __init__(self) -> None:
        self.record = Recorder(Collected(), make_request(), None, lambda: None)
        self.history = AttemptHistory(self.record)

    def deliver(self, token: int) -> None:
        self.record.deliver(Delta(self.record.position, [token]))

    def counts(self) -> tuple[int, int, int]:
        progress = self.history.progress()
        return progress.moves, progress.free_moves, progress.barren_deaths


LOST = Failure(Reason.DISCONNECTED, "the connection broke")
STILL = Failure(Reason.STALLED, "the engine stands still")
FULL = Failure(Reason.WORKER_AT_CAPACITY, "full")
LONG = Failure(Reason.WORKER_AT_CAPACITY, "too many tokens wait", metadata={"cause": "queue_tokens"})
NONE_LEFT = Failure(Reason.NO_WORKERS, "no worker is left")
BAD = Failure(Reason.INVALID_ARGUMENT, "n is 0")


@pytest.mark.parametrize(
    ("failure", "is_timed", "moves", "free_moves"), [(LOST, False, 1, 0), (FULL, False, 0, 1), (FULL, True, 0, 0)]
)
def test_a_refusal_costs_a_free_move_or_nothing_if_a_deadline_bounds_the_wait(
    failure: Failure, is_timed: bool, moves: int, free_moves: int
) -> None:
    case = Case()

    case.history.count(failure, is_timed=is_timed)

    assert case.counts() == (moves, free_moves, 0)


@pytest.mark.parametrize(("has_begun", "deaths"), [(True, 1), (False, 0)])
def test_a_death_counts_only_if_the_engine_had_begun_the_request(has_begun: bool, deaths: int) -> None:
    case = Case()

    case.history.count_death(LOST, has_begun=has_begun)

    assert case.counts() == (0, 0, deaths)


def test_a_worker_that_delivered_tokens_resets_the_count_of_deaths() -> None:
    case = Case()
    case.history.count_death(LOST, has_begun=True)
    case.history.begin_attempt()
    case.deliver(7)

    case.history.count_death(LOST, has_begun=True)

    assert case.counts() == (0, 0, 0)


def test_tokens_of_an_earlier_attempt_do_not_reset_the_count_of_deaths() -> None:
    case = Case()
    case.deliver(7)
    case.history.begin_attempt()

    case.history.count_death(LOST, has_begun=True)

    assert case.counts() == (0, 0, 1)


@pytest.mark.parametrize(
    ("counted", "last", "expected"),
    [
        ([], LOST, (Reason.DISCONNECTED, "the connection broke")),
        ([LOST], NONE_LEFT, (Reason.DISCONNECTED, "the connection broke; and then: no worker is left")),
        ([LOST, STILL], NONE_LEFT, (Reason.DISCONNECTED, "the connection broke; and then: no worker is left")),
        ([LOST], BAD, (Reason.INVALID_ARGUMENT, "n is 0")),
        ([FULL], NONE_LEFT, (Reason.WORKER_AT_CAPACITY, "full")),
        ([FULL, LONG], FULL, (Reason.WORKER_AT_CAPACITY, "too many tokens wait")),
        ([LONG, FULL], NONE_LEFT, (Reason.WORKER_AT_CAPACITY, "too many tokens wait")),
        ([LONG], BAD, (Reason.INVALID_ARGUMENT, "n is 0")),
    ],
)
def test_the_final_failure_names_the_first_loss_or_the_most_specific_refusal(
    counted: list[Failure], last: Failure, expected: tuple[Reason, str]
) -> None:
    case = Case()
    for one in counted:
        case.history.count(one, is_timed=False)

    failure = case.history.final_failure(last)

    assert (failure.reason, failure.detail) == expected
