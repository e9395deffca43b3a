"""A failure over HTTP: its status, its envelope, and when to come back."""

import json

import pytest

from services.errors import Failure, Reason
from services.frontend.http.errors import envelope, error_response, retry_after_s


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


@pytest.mark.parametrize(("given", "expected"), [(None, 1), (0.0, 1), (0.2, 1), (1.0, 1), (1.01, 2), (30.0, 30)])
def test_retry_after_is_rounded_up_to_whole_seconds(given: float | None, expected: int) -> None:
    assert retry_after_s(Failure(Reason.OVERLOADED, "", retry_after_s=given)) == expected


@pytest.mark.parametrize("reason", list(Reason))
def test_retry_after_is_on_every_429_and_503_and_nowhere_else(reason: Reason) -> None:
    response = error_response(Failure(reason, "x"), "r-1")

    assert ("Retry-After" in response.headers) == (response.status in {429, 503})
