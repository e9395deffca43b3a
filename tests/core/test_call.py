"""Call: what is known of one call, with an attempt that reports its events and an ending that comes from outside."""

import pytest

from services.core.call import IDS_AT_ONCE, Attempt, Call, Cause, Ending, Phase, new_request_id
from services.core.errors import Failure, Reason
from tests.support.doubles import FakeSession, RecordingAttempt

SLOW = Failure(Reason.SLOW_CLIENT, "unread")
DRAINING = Failure(Reason.DRAINING, "shutting down")


def test_a_new_call_has_an_attempt_an_ending_and_something_told_of_its_own() -> None:
    one, other = Call(request_id="r"), Call(request_id="r")

    assert one.attempt is not other.attempt
    assert one.ending is not other.ending
    assert one.told is not other.told
    assert one.told.seed is None
    assert (one.excluded, one.replacement_deadline, one.choice_group) == (frozenset(), None, None)


# Attempt


def test_the_worker_of_an_attempt_is_the_key_of_its_session() -> None:
    assert Attempt().worker is None
    assert Attempt(FakeSession("a#1")).worker == "a#1"


def test_an_attempt_that_begins_is_in_prefill_and_notifies_its_subclass() -> None:
    attempt = RecordingAttempt()
    assert (attempt.has_begun, attempt.phase) == (False, Phase.QUEUED)

    attempt.begin()

    assert (attempt.has_begun, attempt.phase, attempt.begun_count) == (True, Phase.PREFILL, 1)


def test_the_events_of_a_plain_attempt_have_no_effect() -> None:
    attempt = Attempt()

    attempt.on_begun()
    attempt.on_leaving(30.0)

    assert not attempt.has_begun


# Ending


def test_a_failure_from_outside_calls_the_listener() -> None:
    ending = Ending()
    seen: list[Failure | None] = []
    ending.listen(lambda: seen.append(ending.failure))

    ending.fail(SLOW, Cause.SLOW_CLIENT)

    assert seen == [SLOW]
    assert ending.cause is Cause.SLOW_CLIENT


def test_only_the_first_failure_counts() -> None:
    ending = Ending()
    calls: list[str] = []
    ending.listen(lambda: calls.append("failed"))

    ending.fail(SLOW, Cause.SLOW_CLIENT)
    ending.fail(DRAINING, Cause.DRAIN)

    assert (ending.failure, ending.cause, calls) == (SLOW, Cause.SLOW_CLIENT, ["failed"])


def test_a_cause_that_is_set_already_is_kept() -> None:
    ending = Ending()
    ending.cause = Cause.SIGNAL

    ending.fail(DRAINING, Cause.DRAIN)

    assert ending.cause is Cause.SIGNAL


@pytest.mark.parametrize("has_listened", [False, True])
def test_a_failure_without_a_listener_is_recorded_only(has_listened: bool) -> None:
    ending = Ending()
    calls: list[str] = []
    if has_listened:
        ending.listen(lambda: calls.append("failed"))
        ending.listen(None)

    ending.fail(SLOW, Cause.SLOW_CLIENT)

    assert (ending.failure, calls) == (SLOW, [])


def test_new_ids_differ_across_batches() -> None:
    ids = [new_request_id() for _ in range(3 * IDS_AT_ONCE)]

    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {32}
