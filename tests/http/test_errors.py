"""A failure over HTTP: its status, its envelope, and when to come back."""

import json

import pytest

from services.core.errors import TRAITS, Failure, Reason
from services.http.errors import envelope, error_response


def test_the_envelope_has_every_field() -> None:
    failure = Failure(Reason.INVALID_ARGUMENT, "top_p must be above 0", param="top_p")

    assert json.loads(envelope(failure, "r-1")) == {
        "error": {
            "message": "top_p must be above 0",
            "type": "invalid_request_error",
            "code": "INVALID_ARGUMENT",
            "param": "top_p",
            "retryable": False,
            "hint": None,
            "request_id": "r-1",
        }
    }


def test_what_a_failure_tells_beside_its_reason_is_in_the_envelope() -> None:
    failure = Failure(Reason.WORKER_AT_CAPACITY, "full", metadata={"running": "8", "waiting": "16"})

    assert json.loads(envelope(failure, "r-1"))["error"]["metadata"] == {"running": "8", "waiting": "16"}


@pytest.mark.parametrize(
    ("given", "seconds", "milliseconds"),
    [
        (None, "1", "1000"),
        (0.0, "1", "1000"),
        (0.2, "1", "200"),
        (1.0, "1", "1000"),
        (1.01, "2", "1010"),
        (59.2, "60", "59200"),
        (61.0, "60", "60000"),
    ],
)
def test_when_to_come_back_is_told_in_whole_seconds_and_in_milliseconds(
    given: float | None, seconds: str, milliseconds: str
) -> None:
    headers = error_response(Failure(Reason.OVERLOADED, "", retry_after_s=given), "r-1").headers

    assert (headers["Retry-After"], headers["retry-after-ms"]) == (seconds, milliseconds)


@pytest.mark.parametrize("reason", list(Reason))
def test_retry_after_is_on_every_429_and_503_and_nowhere_else(reason: Reason) -> None:
    response = error_response(Failure(reason, "x"), "r-1")

    assert ("Retry-After" in response.headers) == (response.status in {429, 503})


@pytest.mark.parametrize("status", [400, 401, 429, 503, 529, 599])
@pytest.mark.parametrize("reason", list(Reason))
def test_want_of_capacity_has_the_status_that_is_configured_and_says_when_to_come_back(
    reason: Reason, status: int
) -> None:
    response = error_response(Failure(reason, "x"), "r-1", overload_status=status)

    assert ("WWW-Authenticate" in response.headers) == (reason is Reason.UNAUTHENTICATED)
    if reason in (Reason.OVERLOADED, Reason.WORKER_AT_CAPACITY):
        assert (response.status, response.headers["Retry-After"]) == (status, "1")
    else:
        assert response.status == TRAITS[reason].http


@pytest.mark.parametrize("reason", list(Reason))
def test_an_sdk_that_would_retry_by_the_status_alone_is_told_what_the_envelope_tells_programs(reason: Reason) -> None:
    """OpenAI's send anything again that fails with 5xx: also what has just killed two workers."""
    response = error_response(Failure(reason, "x"), "r-1")

    told = json.loads(response.body)["error"]["retryable"]
    assert response.headers["x-should-retry"] == {True: "true", False: "false"}[told]
