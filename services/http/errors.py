"""How a failure looks over HTTP: the status, the OpenAI error envelope, when to come back."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from services.core.errors import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN, TRAITS, Failure, Reason
from services.http.router import NoRoute
from services.http.server.messages import Response

JSON_TYPE = "application/json; charset=utf-8"
RETRY_LATER_STATUSES = frozenset({429, 503})
SHOULD_RETRY = "x-should-retry"
"""OpenAI's SDKs heed it. Without it they send again what fails with 408, 409, 429 or 5xx, whatever the reason."""
OVERLOADED = "overloaded_error"
"""The kind of failures for want of capacity."""


def envelope(
    failure: Failure, request_id: str, *, partial: Mapping[str, Any] | None = None, hint: str | None = None
) -> bytes:
    """`{"error": {…}}` as JSON: `type`, `code` and `metadata` are for programs, `message` and `hint` for people.

    partial: what had come of the answer, for a client that asks for it. hint: where the reason alone has none.
    """
    traits = failure.traits
    error: dict[str, Any] = {
        "message": failure.detail,
        "type": traits.kind,
        "code": failure.reason,
        "param": failure.param,
        "retryable": traits.retryable,
        "hint": hint or traits.hint,
        "request_id": request_id,
    }
    if failure.metadata:
        error["metadata"] = failure.metadata
    if partial is not None:
        error["partial"] = partial
    return msgspec.json.encode({"error": error})


def error_response(
    failure: Failure,
    request_id: str,
    *,
    partial: Mapping[str, Any] | None = None,
    overload_status: int | None = None,
) -> Response:
    """The failure as a whole response. overload_status: of failures for want of capacity; None: as the table says."""
    is_overload = failure.traits.kind == OVERLOADED
    status = status_of(failure.reason, overload_status)
    response = json_response(envelope(failure, request_id, partial=partial), status=status)
    response.headers[SHOULD_RETRY] = "true" if failure.traits.retryable else "false"
    if is_overload or status in RETRY_LATER_STATUSES:
        retry_after_s = retry_after_s_of(failure)
        response.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        response.headers["retry-after-ms"] = str(round(retry_after_s * 1e3))
    if failure.reason is Reason.UNAUTHENTICATED:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def status_of(reason: Reason, overload_status: int | None) -> int:
    """overload_status: of failures for want of capacity; None: as the table says."""
    traits = TRAITS[reason]
    return (overload_status if traits.kind == OVERLOADED else None) or traits.http


def json_response(body: bytes, *, status: int = 200) -> Response:
    """A response of JSON that is encoded already."""
    return Response(body, status, {"Content-Type": JSON_TYPE})


def retry_after_s_of(failure: Failure) -> float:
    """When to come back: the failure's own time, at most RETRY_AFTER_S_MAX, else RETRY_AFTER_S_MIN."""
    return min(failure.retry_after_s or RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX)


def no_route_response(error: NoRoute, request_id: str) -> Response:
    """What nothing here takes: 405 where another method would be taken, else 404."""
    body = envelope(Failure(Reason.INVALID_ARGUMENT, str(error)), request_id, hint=error.hint)
    response = json_response(body, status=405 if error.allowed else 404)
    if error.allowed:
        response.headers["Allow"] = ", ".join(error.allowed)
    return response
