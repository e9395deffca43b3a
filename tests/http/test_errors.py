"""A failure over HTTP has its status, the error envelope, and headers that say when to retry."""

import json

import pytest

from services.core.errors import TRAITS, Failure, Reason
from services.http.errors import envelope, error_response


def test_envelope_has_every_field() -> None:
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


def test_metadata_of_a_failure_is_in_the_envelope() -> None:
    failure = Failure(Reason.NO_WORKERS, "none", metadata={"running": "8", "waiting": "16"})

    assert json.loads(envelope(failure, "r-1"))["error"]["metadata"] == {"running": "8", "waiting": "16"}


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.MODEL_NOT_FOUND, "model_not_found"),
        (Reason.PROMPT_TOO_LONG, "context_length_exceeded"),
        (Reason.UNAUTHENTICATED, "invalid_api_key"),
        (Reason.OVERLOADED, None),
        (Reason.INTERNAL, None),
    ],
)
def test_code_of_openai_is_beside_ours_if_there_is_one(reason: Reason, code: str | None) -> None:
    """Stock clients look for it in the text of an error."""
    error = json.loads(envelope(Failure(reason, "x"), "r-1"))["error"]

    assert error["code"] == reason
    assert error.get("metadata", {}).get("openai_code") == code


def test_failure_may_have_another_code_of_openai_than_its_reason() -> None:
    failure = Failure(Reason.MODEL_NOT_FOUND, "x", metadata={"openai_code": "mine"})

    assert json.loads(envelope(failure, "r-1"))["error"]["metadata"] == {"openai_code": "mine"}


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
def test_retry_time_is_given_in_whole_seconds_and_in_milliseconds(
    given: float | None, seconds: str, milliseconds: str
) -> None:
    headers = error_response(Failure(Reason.OVERLOADED, "", retry_after_s=given), "r-1").headers

    assert (headers["Retry-After"], headers["retry-after-ms"]) == (seconds, milliseconds)


@pytest.mark.parametrize("reason", list(Reason))
def test_only_429_and_503_have_retry_after(reason: Reason) -> None:
    response = error_response(Failure(reason, "x"), "r-1")

    assert ("Retry-After" in response.headers) == (response.status in {429, 503})


@pytest.mark.parametrize("status", [400, 401, 429, 503, 529, 599])
@pytest.mark.parametrize("reason", list(Reason))
def test_lack_of_capacity_has_the_configured_status_and_retry_after(reason: Reason, status: int) -> None:
    response = error_response(Failure(reason, "x"), "r-1", overload_status=status)

    assert ("WWW-Authenticate" in response.headers) == (reason is Reason.UNAUTHENTICATED)
    if reason in (Reason.OVERLOADED, Reason.WORKER_AT_CAPACITY):
        assert (response.status, response.headers["Retry-After"]) == (status, "1")
    else:
        assert response.status == TRAITS[reason].http


@pytest.mark.parametrize("reason", list(Reason))
def test_should_retry_header_agrees_with_the_envelope(reason: Reason) -> None:
    """OpenAI's SDKs retry after any 5xx, also a request that has just killed two workers."""
    response = error_response(Failure(reason, "x"), "r-1")

    is_retryable = json.loads(response.body)["error"]["retryable"]
    assert response.headers["x-should-retry"] == {True: "true", False: "false"}[is_retryable]
