"""What a request gets when the helpers for guided fields have no room: another worker may have some."""

from services.core.bounded_executor import not_prepared
from services.core.errors import Reason, RefusedFor, invalid, refused_for
from services.worker.guided.refusals import of_pool


def test_pool_without_room_is_a_worker_at_capacity() -> None:
    refused = of_pool(not_prepared("no process was free"))

    assert (refused.reason, refused_for(refused)) == (Reason.WORKER_AT_CAPACITY, RefusedFor.PREPARATION)
    assert "no process was free" in refused.detail


def test_other_failures_of_the_pool_stay_as_they_are() -> None:
    failure = invalid("guided", "no answer can match it")

    assert of_pool(failure) is failure
