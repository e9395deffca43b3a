"""MigrationAttempt: passes each event of its worker to the migration, and says which attempt it comes from."""

from services.core.interface import Delta
from services.frontend.migration.attempt import MigrationAttempt
from tests.support.doubles import FakeSession


class Observer:
    """Records the events of attempts."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def on_tokens(self, attempt: MigrationAttempt, delta: Delta) -> None:
        self.events.append(("tokens", attempt, delta))

    def leave_group(self) -> None:
        self.events.append(("leave group",))

    def on_leaving(self, attempt: MigrationAttempt, grace_s: float) -> None:
        self.events.append(("leaving", attempt, grace_s))


def test_tokens_and_a_leaving_worker_are_reported_with_the_attempt() -> None:
    observer = Observer()
    attempt, delta = MigrationAttempt(observer, 4), Delta(0, [7])

    attempt.deliver(delta)
    attempt.on_leaving(30.0)

    assert observer.events == [("tokens", attempt, delta), ("leaving", attempt, 30.0)]


def test_a_choice_leaves_its_group_when_the_engine_begins() -> None:
    observer = Observer()
    attempt = MigrationAttempt(observer, 4)

    attempt.begin()

    assert attempt.has_begun
    assert observer.events == [("leave group",)]


def test_a_new_attempt_runs_without_a_worker_and_its_cancel_does_nothing() -> None:
    attempt = MigrationAttempt(Observer(), 4)

    attempt.cancel()

    assert (attempt.outcome, attempt.worker, attempt.leaves_at, attempt.has_own_task) == (None, None, None, False)


def test_the_worker_is_the_key_of_the_session_that_route_chose() -> None:
    attempt = MigrationAttempt(Observer(), 4)

    attempt.session = FakeSession("a#1")

    assert attempt.worker == "a#1"
