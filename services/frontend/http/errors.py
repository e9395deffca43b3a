"""How a failure looks over HTTP: the status, the OpenAI error envelope, Retry-After."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from services.errors import Failure, Reason

JSON_TYPE = "application/json; charset=utf-8"
PATH_CHARACTERS_MAX = 200
RETRY_AFTER_S_MIN = 1
RETRY_LATER_STATUSES = frozenset({429, 503})


def envelope(
    failure: Failure, request_id: str, *, partial: Mapping[str, Any] | None = None, hint: str | None = None
) -> bytes:
    """`{"error": {…}}` as JSON: `type` and `code` are for programs, `message` and `hint` for people.

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
    if partial is not None:
        error["partial"] = partial
    return msgspec.json.encode({"error": error})


def error_response(failure: Failure, request_id: str, *, partial: Mapping[str, Any] | None = None) -> web.Response:
    """The failure as a whole response."""
    response = json_response(envelope(failure, request_id, partial=partial), status=failure.traits.http)
    if response.status in RETRY_LATER_STATUSES:
        response.headers["Retry-After"] = str(retry_after_s(failure))
    return response


def json_response(body: bytes, *, status: int = 200) -> web.Response:
    """A response of JSON that is encoded already."""
    return web.Response(body=body, status=status, headers={"Content-Type": JSON_TYPE})


def retry_after_s(failure: Failure) -> int:
    """Whole seconds for Retry-After: the failure's own time rounded up, at least 1."""
    return max(RETRY_AFTER_S_MIN, math.ceil(failure.retry_after_s or 0))


def routing_response(request: web.Request, error: web.HTTPException, request_id: str) -> web.Response:
    """What aiohttp's router refused, with its own status and one sentence."""
    match error:
        case web.HTTPNotFound():
            detail = f"there is no {request.method} {request.path[:PATH_CHARACTERS_MAX]} here"
        case web.HTTPMethodNotAllowed(allowed_methods=allowed):
            detail = f"{request.path} does not take {request.method}: use {' or '.join(sorted(allowed))}"
        case _:
            detail = f"{request.method} {request.path[:PATH_CHARACTERS_MAX]} was refused: {error.reason}"
    body = envelope(Failure(Reason.INVALID_ARGUMENT, detail), request_id, hint=_endpoints(request.app))
    response = json_response(body, status=error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def _endpoints(app: web.Application) -> str:
    """All that there is, in a sentence."""
    routes = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource is not None}
    names = sorted((path, method) for method, path in routes if method != "HEAD")  # It comes with every GET.
    return f"There are {', '.join(f'{method} {path}' for path, method in names)}."
