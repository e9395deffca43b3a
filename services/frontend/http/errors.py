"""How a failure looks over HTTP: the status, the OpenAI error envelope, Retry-After."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from services.errors import Failure, Reason

JSON_TYPE = "application/json; charset=utf-8"
RETRY_AFTER_S_MIN = 1
RETRY_LATER_STATUSES = frozenset({429, 503})


def envelope(failure: Failure, request_id: str, *, partial: Mapping[str, Any] | None = None) -> bytes:
    """`{"error": {…}}` as JSON: `type` and `code` are for programs, `message` and `hint` for people.

    partial: what had come of the answer, for a client that asks for it.
    """
    traits = failure.traits
    error: dict[str, Any] = {
        "message": failure.detail,
        "type": traits.kind,
        "code": failure.reason,
        "param": failure.param,
        "retryable": traits.retryable,
        "hint": traits.hint,
        "request_id": request_id,
    }
    if partial is not None:
        error["partial"] = partial
    return msgspec.json.encode({"error": error})


def error_response(
    failure: Failure, request_id: str, *, status: int | None = None, partial: Mapping[str, Any] | None = None
) -> web.Response:
    """The failure as a whole response. `status`: where HTTP knows better than the table (404 and 405 of routing)."""
    response = json_response(envelope(failure, request_id, partial=partial), status=status or failure.traits.http)
    if response.status in RETRY_LATER_STATUSES:
        response.headers["Retry-After"] = str(retry_after_s(failure))
    return response


def json_response(body: bytes, *, status: int = 200) -> web.Response:
    """A response of JSON that is encoded already."""
    return web.Response(body=body, status=status, headers={"Content-Type": JSON_TYPE})


def retry_after_s(failure: Failure) -> int:
    """Whole seconds for Retry-After: the failure's own time rounded up, at least 1."""
    return max(RETRY_AFTER_S_MIN, math.ceil(failure.retry_after_s or 0))


def routing_failure(request: web.Request, error: web.HTTPException) -> Failure:
    """What aiohttp's router refused, as a failure with one sentence."""
    match error:
        case web.HTTPNotFound():
            detail = f"there is no {request.method} {request.path} here: see /v1/models, /v1/chat/completions"
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            detail = f"{request.path} does not take {request.method}: use {' or '.join(sorted(allowed))}"
        case _:
            detail = f"{request.method} {request.path} was refused: {error.reason}"
    return Failure(Reason.INVALID_ARGUMENT, detail)
