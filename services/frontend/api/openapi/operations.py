"""Every call over HTTP as the OpenAPI document lists it: what it takes, what it answers, and how it can fail."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any

from msgspec import Struct, field

from services.core.errors import Reason
from services.core.generation.kept import ID_FORM
from services.core.validation import NAME_FORM
from services.frontend.api import health, request_headers, response_headers
from services.frontend.api.admin import http_routes as admin
from services.frontend.api.openai import schemas
from services.frontend.api.openai.bodies import ChatBody, CompletionBody

GENERATION_ID_SCHEMA = {"type": "string", "pattern": f"^(chatcmpl-|cmpl-)?({ID_FORM})$"}
NAME_SCHEMA = {"type": "string", "pattern": f"^{NAME_FORM.pattern}$"}


class Document(Struct, kw_only=True):
    """This document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path.

    `answer`: the JSON body of status 200; None: plain text. `event`: the data of each event, if the answer can be
    streamed. A union: one of them. `reasons`: how the call can fail, besides the reasons that every call has.
    `headers`: header → schema, besides the headers that every call has; `answer_headers`: those of status 200.
    `is_guarded`: needs the admin token, if there is one. `is_open`: needs no key, even where clients need keys.
    `nothing`: what status 204 means, if there is one.
    """

    summary: str
    answer: type[Struct] | UnionType | None = None
    event: type[Struct] | UnionType | None = None
    body: type[Struct] | None = None
    reasons: frozenset[Reason] = frozenset()
    headers: Mapping[str, Mapping[str, Any]] | None = None
    answer_headers: Mapping[str, Mapping[str, Any]] | None = None
    is_guarded: bool = False
    is_open: bool = False
    nothing: str | None = None


_NOTHING = f"The `{request_headers.LAST_EVENT_ID}` is that of the last event: there is nothing to come back for."
_BODY = frozenset({Reason.INVALID_ARGUMENT, Reason.BODY_TOO_LARGE, Reason.DEADLINE_EXCEEDED})
"""Reasons of calls with a body."""
_MODEL = frozenset({Reason.MODEL_NOT_FOUND, Reason.NO_WORKERS})
"""Reasons of calls that name a model."""
_KEY = frozenset({Reason.UNAUTHENTICATED})
"""Reasons of calls that need a key or a token, if there is one."""
_OTHER_PROCESSES = frozenset({Reason.STALLED, Reason.DRAINING})
"""Reasons of calls that ask all processes of a frontend: one of them may not answer."""
ANSWER_REASONS = frozenset(Reason) - {Reason.INSTANCE_NOT_FOUND, Reason.STORE_AWAY}
"""A request that is repeated with the id of the last event is a resume, and can fail as one."""

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        summary="Complete a prompt",
        body=CompletionBody,
        answer=schemas.Completion,
        event=schemas.Completion,
        reasons=ANSWER_REASONS,
        headers=request_headers.HEADERS,
        answer_headers=response_headers.HEADERS,
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Complete a conversation",
        body=ChatBody,
        answer=schemas.ChatCompletion,
        event=schemas.ChatCompletionChunk,
        reasons=ANSWER_REASONS,
        headers=request_headers.HEADERS,
        answer_headers=response_headers.HEADERS,
    ),
    ("GET", "/v1/streams/{generation_id}"): Operation(
        summary="Resume an answer that its client has lost",
        answer=schemas.Completion | schemas.ChatCompletion,
        event=schemas.Completion | schemas.ChatCompletionChunk,
        reasons=ANSWER_REASONS - {Reason.BODY_TOO_LARGE},
        headers=request_headers.RESUME_HEADERS,
        answer_headers=response_headers.HEADERS,
        nothing=_NOTHING,
    ),
    ("POST", "/v1/requests/{request_id}/cancel"): Operation(
        summary="Cancel all requests with this id",
        answer=schemas.Cancelled,
        reasons=_OTHER_PROCESSES | _KEY | {Reason.INVALID_ARGUMENT},
    ),
    ("GET", "/v1/models"): Operation(
        summary="List the models that can be served now",
        answer=schemas.ModelList,
        reasons=_KEY | {Reason.NO_WORKERS},
    ),
    ("GET", "/v1/models/{model}"): Operation(summary="Get one model", answer=schemas.Model, reasons=_MODEL | _KEY),
    ("GET", "/live"): Operation(summary="Whether this process answers", answer=health.Live, is_open=True),
    ("GET", "/health"): Operation(
        summary="Whether requests can be served",
        answer=health.Ready,
        reasons=frozenset({Reason.DRAINING, Reason.NO_WORKERS}),
        is_open=True,
    ),
    ("GET", "/metrics"): Operation(
        summary="Metrics in Prometheus's text format", reasons=_OTHER_PROCESSES, is_open=True
    ),
    ("GET", "/busy_threshold"): Operation(
        summary="Read the load above which workers count as busy",
        answer=admin.AllThresholds,
        reasons=_KEY,
        is_guarded=True,
    ),
    ("POST", "/busy_threshold"): Operation(
        summary="Change the busy thresholds of a model",
        body=admin.ThresholdsChange,
        answer=admin.ChangedThresholds,
        reasons=_BODY | _OTHER_PROCESSES | _MODEL | _KEY,
        is_guarded=True,
    ),
    ("GET", "/openapi.json"): Operation(summary="This document", answer=Document, reasons=_KEY),
}
"""By method and path. HEAD is answered as GET, without the body."""
