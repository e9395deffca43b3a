"""What can be called over HTTP, for the OpenAPI document: what each call takes, answers, and can fail with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from services.core.errors import Reason
from services.core.validation import MIGRATION_LIMIT, MIGRATION_LIMIT_DIGITS_MAX, NAME_FORM
from services.frontend.api.admin.http_routes import ThresholdsChange
from services.frontend.api.openai.bodies import ChatBody, CompletionBody
from services.frontend.api.openapi import schemas
from services.http.headers import REQUEST_TIMEOUT, REQUEST_TIMEOUT_S_MAX, RETURN_PARTIAL

NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME_FORM.pattern}$"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path.

    answer: of status 200, in JSON; None: text. event: the data of the events, where it can be streamed. reasons: that
    it can fail with, beside those of any request. headers: that it heeds, beside those of any request: → their schema.
    """

    summary: str
    answer: type[Struct] | None = None
    event: type[Struct] | None = None
    body: type[Struct] | None = None
    reasons: frozenset[Reason] = frozenset()
    headers: Mapping[str, Mapping[str, Any]] | None = None
    is_guarded: bool = False


_BODY = frozenset({Reason.INVALID_ARGUMENT, Reason.BODY_TOO_LARGE, Reason.DEADLINE_EXCEEDED})
_OTHERS = frozenset({Reason.STALLED, Reason.DRAINING})
"""Of a frontend that is several processes, where one does not answer another."""
_NOT_OF_REQUESTS = {Reason.INSTANCE_NOT_FOUND, Reason.STORE_AWAY, Reason.TAKEN_OVER, Reason.UNAUTHENTICATED}
ANSWER_REASONS = frozenset(Reason) - _NOT_OF_REQUESTS
_ANSWER_HEADERS: Mapping[str, Mapping[str, Any]] = {
    REQUEST_TIMEOUT: {"type": "number", "exclusiveMinimum": 0, "maximum": REQUEST_TIMEOUT_S_MAX},
    RETURN_PARTIAL: {"type": "string", "enum": ["true", "false"]},
    MIGRATION_LIMIT: {"type": "integer", "minimum": 0, "exclusiveMaximum": 10**MIGRATION_LIMIT_DIGITS_MAX},
}

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        summary="Go on after a prompt",
        body=CompletionBody,
        answer=schemas.Completion,
        event=schemas.Completion,
        reasons=ANSWER_REASONS,
        headers=_ANSWER_HEADERS,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Go on with a conversation",
        body=ChatBody,
        answer=schemas.ChatCompletion,
        event=schemas.ChatCompletionChunk,
        reasons=ANSWER_REASONS,
        headers=_ANSWER_HEADERS,
    ),
    ("POST", "/v1/requests/{request_id}/cancel"): Operation(
        summary="End every request of that name",
        answer=schemas.Cancelled,
        reasons=_OTHERS | {Reason.INVALID_ARGUMENT},
    ),
    ("GET", "/v1/models"): Operation(summary="The models that can be served now", answer=schemas.ModelList),
    ("GET", "/v1/models/{model}"): Operation(
        summary="One of them", answer=schemas.Model, reasons=frozenset({Reason.MODEL_NOT_FOUND})
    ),
    ("GET", "/live"): Operation(summary="Whether this process answers", answer=schemas.Live),
    ("GET", "/health"): Operation(
        summary="Whether it is ready for requests",
        answer=schemas.Ready,
        reasons=frozenset({Reason.DRAINING, Reason.NO_WORKERS}),
    ),
    ("GET", "/metrics"): Operation(summary="Metrics in Prometheus's text format", reasons=_OTHERS),
    ("GET", "/busy_threshold"): Operation(
        summary="Above what load workers count as busy",
        answer=schemas.AllThresholds,
        reasons=frozenset({Reason.UNAUTHENTICATED}),
        is_guarded=True,
    ),
    ("POST", "/busy_threshold"): Operation(
        summary="Change that for a model",
        body=ThresholdsChange,
        answer=schemas.ChangedThresholds,
        reasons=_BODY | _OTHERS | {Reason.MODEL_NOT_FOUND, Reason.UNAUTHENTICATED},
        is_guarded=True,
    ),
    ("GET", "/openapi.json"): Operation(summary="This document", answer=schemas.Document),
}
"""By method and path. HEAD is answered as GET, without the body."""
