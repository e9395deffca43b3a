"""Failures as HTTP responses: the status, the OpenAI error envelope, and when to retry."""

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.core.errors import (
    CAUSE,
    RETRY_AFTER_S_MAX,
    RETRY_AFTER_S_MIN,
    TRAITS,
    Failure,
    Reason,
    RefusedFor,
    jittered_s,
)
from services.http.router import NoRoute
from services.http.server.messages import Response

JSON_TYPE = "application/json; charset=utf-8"
RETRY_LATER_STATUSES = frozenset({429, 503})
SHOULD_RETRY = "x-should-retry"
"""OpenAI's SDKs obey this header. Without it they retry after 408, 409, 429 and 5xx, whatever the reason."""
OVERLOADED = "overloaded_error"
"""The `type` of failures for lack of capacity."""


class ErrorDetail(Struct, kw_only=True):
    """type, code and metadata are for programs, message and hint for people.

    param: the field at fault. partial: the answer up to the failure, for a client that asks with X-Return-Partial.
    """

    message: str
    type: str
    code: str
    param: str | None
    retryable: bool
    hint: str | None
    request_id: str
    metadata: Mapping[str, str] | UnsetType = UNSET
    partial: dict[str, Any] | UnsetType = UNSET


class Error(Struct, kw_only=True):
    """The body of every failure. In a stream that has begun: the data of the event `error`."""

    error: ErrorDetail


def envelope(failure: Failure, request_id: str, *, partial: dict[str, Any] | None = None) -> bytes:
    """The failure as an `Error` in JSON. `partial`: the answer up to the failure, if the client asked for it."""
    traits = failure.traits
    detail = ErrorDetail(
        message=failure.detail,
        type=traits.kind,
        code=failure.reason,
        param=failure.param,
        retryable=traits.retryable,
        hint=failure.hint,
        request_id=request_id,
    )
    if metadata := failure.shown_metadata:
        detail.metadata = metadata
    if partial is not None:
        detail.partial = partial
    return msgspec.json.encode(Error(error=detail))


def error_response(
    failure: Failure,
    request_id: str,
    *,
    partial: dict[str, Any] | None = None,
    overload_status: int | None = None,
) -> Response:
    """The response to a request that fails. `overload_status`: see `status_of`."""
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
    """The HTTP status of a reason. `overload_status`: replaces the status of failures for lack of capacity."""
    traits = TRAITS[reason]
    return (overload_status if traits.kind == OVERLOADED else None) or traits.http


def json_response(body: bytes, *, status: int = 200) -> Response:
    """A response with a body of encoded JSON."""
    return Response(body, status, {"Content-Type": JSON_TYPE})


def retry_after_s_of(failure: Failure) -> float:
    """When to retry: the failure's own time, at most RETRY_AFTER_S_MAX; RETRY_AFTER_S_MIN if it has none.

    A rate comes back when it does, and not before.
    """
    if failure.reason is Reason.RATE_LIMITED and failure.retry_after_s is not None:
        return failure.retry_after_s
    return min(failure.retry_after_s or RETRY_AFTER_S_MIN, RETRY_AFTER_S_MAX)


def no_room(rng: Random) -> Failure:
    """The failure of a request for whose connection there is no room. `rng`: spreads the times to try again."""
    return Failure(
        Reason.OVERLOADED,
        "the server has no room for another connection: try again, or another server",
        retry_after_s=jittered_s(RETRY_AFTER_S_MIN, rng),
        metadata={CAUSE: RefusedFor.CONNECTIONS},
    )


def no_route_response(error: NoRoute, request_id: str) -> Response:
    """The response to a request that no route takes: 405 if its path takes another method, otherwise 404."""
    body = envelope(Failure(Reason.INVALID_ARGUMENT, str(error), hint=error.hint), request_id)
    response = json_response(body, status=405 if error.allowed else 404)
    if error.allowed:
        response.headers["Allow"] = ", ".join(error.allowed)
    return response
