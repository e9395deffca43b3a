"""MigrationAttempt: passes each event of its worker to the migration, and says which attempt it comes from."""

import pytest

from services.core.call import Call
from services.core.errors import Reason
from services.core.interface import Delta
from services.core.request import FinishReason
from services.frontend.migration.attempt import MigrationAttempt
from tests.support.doubles import FakeSession, Script, Step, make_request, run_async


class Observer:
    """Records the events of attempts."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_tokens(self, attempt: MigrationAttempt, delta: Delta) -> None:
        self.events.append(("tokens", attempt, delta))

    def is_current(self, attempt: MigrationAttempt) -> bool:
        return ("tokens", attempt) in [event[:2] for event in self.events]

    def on_begun(self) -> None:
        self.events.append(("begun",))

    def on_leaving(self, attempt: MigrationAttempt, grace_s: float) -> None:
        self.events.append(("leaving", attempt, grace_s))


def test_tokens_and_a_leaving_worker_are_reported_with_the_attempt() -> None:
    observer = Observer()
    attempt, delta = MigrationAttempt(observer, 4), Delta(0, [7])

    attempt.deliver(delta)
    attempt.on_leaving(30.0)

    assert observer.events == [("tokens", attempt, delta), ("leaving", attempt, 30.0)]


def test_an_engine_that_begins_is_reported() -> None:
    observer = Observer()
    attempt = MigrationAttempt(observer, 4)

    attempt.begin()

    assert attempt.has_begun
    assert observer.events == [("begun",)]


def test_the_migration_says_whether_the_attempt_is_needed() -> None:
    attempt = MigrationAttempt(Observer(), 4)
    assert not attempt.is_needed

    attempt.deliver(Delta(0, [7]))

    assert attempt.is_needed


def test_a_new_attempt_runs_without_a_worker_and_its_cancel_does_nothing() -> None:
    attempt = MigrationAttempt(Observer(), 4)

    attempt.cancel()

    assert (attempt.outcome, attempt.worker, attempt.leaves_at, attempt.has_own_task) == (None, None, None, False)


def test_the_worker_is_the_key_of_the_session_that_route_chose() -> None:
    attempt = MigrationAttempt(Observer(), 4)

    attempt.session = FakeSession("a#1")

    assert attempt.worker == "a#1"


@pytest.mark.parametrize("end", [FinishReason.STOP, Reason.DISCONNECTED])
def test_outcome_is_the_finish_or_the_failure_of_the_layer_below(end: Step) -> None:
    observer, script = Observer(), Script([7, end])
    attempt = MigrationAttempt(observer, 4)

    run_async(attempt.run(script, make_request(), Call(request_id="r")))

    assert attempt.outcome is not None
    assert attempt.outcome.reason is end
    assert script.calls[0].attempt is attempt
    assert [event[0] for event in observer.events] == ["begun", "tokens"]
