"""Request headers of the OpenAI endpoints: the file to edit when a header is added.

To add a header, put its name and JSON schema into `HEADERS`, which is a part of the OpenAPI document, and read it in a
function here. `call_of` reads the headers that apply to the call, such as the deadline. A header that changes the
request, such as a sampling setting, is applied by `OpenAiEndpoints.serve` after the body is parsed.
`X-Request-Id`, which every path takes, is read in services/http/request_id.py.
"""

from collections.abc import Mapping
from typing import Any

from services.core.call import Call
from services.core.errors import invalid
from services.core.generation.cursor import CURSOR_CHARACTERS_MAX, CURSOR_FORM, DONE_ID, Cursor, parse_cursor
from services.core.generation.wish import (
    DETACH_GRACE,
    DETACH_GRACE_S_MAX,
    GENERATION_ID,
    ON_DISCONNECT,
    generation_id_of,
    kept_of,
    parse_generation_id,
)
from services.core.validation import (
    GRPC_TIMEOUT,
    MIGRATION_LIMIT,
    MIGRATION_LIMIT_DIGITS_MAX,
    REQUEST_TIMEOUT,
    REQUEST_TIMEOUT_S_MAX,
    migration_limit_of,
    timeout_s_of,
)
from services.http.request_id import REQUEST_ID
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from services.runtime.loop import clock

RETURN_PARTIAL = "X-Return-Partial"
LAST_EVENT_ID = "Last-Event-ID"


def _duration(seconds_max: float, *examples: str) -> Mapping[str, Any]:
    """The schema of a number of seconds, or of a duration."""
    return {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": seconds_max},
            {"type": "string", "pattern": "^[1-9][0-9]{0,2}(ms|s|m)$", "examples": [*examples]},
        ]
    }


HEADERS: Mapping[str, Mapping[str, Any]] = {
    REQUEST_TIMEOUT: _duration(REQUEST_TIMEOUT_S_MAX, "30s", "500ms"),
    GRPC_TIMEOUT: {"type": "string", "pattern": "^[1-9][0-9]{0,3}[Smun]$", "examples": ["30S", "500m"]},
    RETURN_PARTIAL: {"type": "string", "enum": ["true", "false"]},
    ON_DISCONNECT: {"type": "string", "enum": ["cancel", "continue"]},
    DETACH_GRACE: _duration(DETACH_GRACE_S_MAX, "30s", "5m"),
    MIGRATION_LIMIT: {"type": "integer", "minimum": 0, "exclusiveMaximum": 10**MIGRATION_LIMIT_DIGITS_MAX},
}
"""Header → its JSON schema."""
RESUME_HEADERS: Mapping[str, Mapping[str, Any]] = {
    LAST_EVENT_ID: {"type": "string", "pattern": f"^(?:{CURSOR_FORM}|{DONE_ID})$", "maxLength": CURSOR_CHARACTERS_MAX},
    **{name: HEADERS[name] for name in (REQUEST_TIMEOUT, GRPC_TIMEOUT)},
}
"""The same for answers that are resumed."""


def call_of(request: HttpRequest, endpoint: str, config: HttpConfig) -> Call:
    """The call that the headers describe. Raises Failure(INVALID_ARGUMENT)."""
    return Call(
        request_id=request.id,
        tenant=request.tenant,
        deadline=deadline_of(request, config),
        endpoint=endpoint,
        migration_limit=migration_limit_of(request.headers.get(MIGRATION_LIMIT.lower())),
        kept=kept_of(
            request.headers,
            request.id,
            config.keep,
            request.tenant,
            is_id_given=request.id == request.headers.get(REQUEST_ID.lower()),
        ),
    )


def resume_of(request: HttpRequest) -> tuple[bytes, Cursor | None]:
    """The answer that a repeated request wants to go on with, and the client's cursor.

    A client that repeats its request sends the id of the last event, and that of the answer as X-Request-Id or
    X-Unbroken-Generation-Id. Raises Failure(INVALID_ARGUMENT).
    """
    cursor = _cursor_of(request)
    name = GENERATION_ID if GENERATION_ID.lower() in request.headers else REQUEST_ID
    if (generation_id := generation_id_of(request.headers.get(name.lower(), ""))) is None:
        detail = (
            f"a request with {LAST_EVENT_ID} goes on with an answer, and {name} must be its id: 32 hexadecimal digits, "
            f"or a UUID"
        )
        raise invalid(name, detail)
    return generation_id, cursor


def lost_answer_of(request: HttpRequest) -> tuple[bytes, Cursor | None]:
    """The answer that a client has lost, by the path, and its cursor. Raises Failure(INVALID_ARGUMENT)."""
    return parse_generation_id(request.arguments["generation_id"], "id"), _cursor_of(request)


def _cursor_of(request: HttpRequest) -> Cursor | None:
    """How far the client is in the answer that it resumes; None: at its beginning. Raises Failure(INVALID_ARGUMENT)."""
    given = request.headers.get(LAST_EVENT_ID.lower(), "")
    return parse_cursor(given, LAST_EVENT_ID) if given not in {"", DONE_ID} else None


def is_done(request: HttpRequest) -> bool:
    """Whether the client comes back for events although it has got the last one, as an EventSource does."""
    is_last = request.headers.get(LAST_EVENT_ID.lower()) == DONE_ID
    return is_last and wants_events(request.headers.get("accept", ""), otherwise=True)


def wants_events(accepted: str, *, otherwise: bool) -> bool:
    """Whether a client with this `Accept` gets the answer that it resumes as events, rather than whole."""
    if "text/event-stream" in accepted:
        return True
    return otherwise and "application/json" not in accepted


def deadline_of(request: HttpRequest, config: HttpConfig) -> float | None:
    """The deadline in event-loop time: as the headers say (see `timeout_s_of`), or the configured default.

    Raises Failure(INVALID_ARGUMENT).
    """
    timeout_s = timeout_s_of(request.headers)
    if timeout_s is None:
        timeout_s = config.request_timeout_s
    return None if timeout_s is None else clock() + timeout_s


def wants_partial(request: HttpRequest) -> bool:
    """`X-Return-Partial`: whether the error of an answer that fails halfway includes the answer up to the failure.

    Raises Failure(INVALID_ARGUMENT) unless the header is true or false.
    """
    given = request.headers.get(RETURN_PARTIAL.lower(), "false").lower()
    if given not in {"true", "false"}:
        raise invalid(RETURN_PARTIAL, f"the header {RETURN_PARTIAL} must be true or false")
    return given == "true"
