"""Everything that can go wrong with a request: one exception, one closed enum of reasons, one table.

`reason` is for programs and never changes its meaning; `detail` is for people and may change. Add a reason only if a
program or client would act differently on it. The table says what follows from a reason alone: the codes that a client
sees, who may retry, and whether a worker is to blame. What depends on the progress of the request as well, above all
after an ENGINE_ERROR, is in `frontend/migration/policy.py`.

Refusals for want of room also name the bound that was met (`RefusedFor`) and when to retry (`jittered_s`).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from grpc import StatusCode

QUOTED_CHARACTERS_MAX = 200
"""How much of a client's text a failure's detail quotes."""


OPENAI_CODE = "openai_code"
"""The key of OpenAI's `code` in the metadata that clients get. A failure's own metadata may have another one."""
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class Reason(StrEnum):
    """Why a request failed."""

    CANNOT_CONNECT = "CANNOT_CONNECT"
    DISCONNECTED = "DISCONNECTED"
    STALLED = "STALLED"
    STREAM_INCOMPLETE = "STREAM_INCOMPLETE"
    PROTOCOL_VIOLATION = "PROTOCOL_VIOLATION"
    ENGINE_DEAD = "ENGINE_DEAD"
    WORKER_AT_CAPACITY = "WORKER_AT_CAPACITY"
    DRAINING = "DRAINING"
    ENGINE_ERROR = "ENGINE_ERROR"
    POISON_REQUEST = "POISON_REQUEST"
    GRAMMAR_REPLAY_MISMATCH = "GRAMMAR_REPLAY_MISMATCH"
    OVERLOADED = "OVERLOADED"
    NO_WORKERS = "NO_WORKERS"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    SLOW_CLIENT = "SLOW_CLIENT"
    INSTANCE_NOT_FOUND = "INSTANCE_NOT_FOUND"
    STORE_AWAY = "STORE_AWAY"
    TAKEN_OVER = "TAKEN_OVER"
    STREAM_NOT_FOUND = "STREAM_NOT_FOUND"
    STREAM_EXPIRED = "STREAM_EXPIRED"
    RESUME_DIVERGED = "RESUME_DIVERGED"
    CURSOR_BEYOND_END = "CURSOR_BEYOND_END"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    RATE_LIMITED = "RATE_LIMITED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What follows from a reason.

    `grpc`, `http`: the status that a client sees. `kind`: the `type` in OpenAI's error envelope. `migrates`: the
    frontend may continue the stream on another worker. `free`: such a move does not count against the migration limit.
    `blames_worker`: the worker is quarantined. `retryable`: the client may send the same request again. `hint`: what a
    person should do; None if the failure's detail says it. `openai_code`: OpenAI's `code` for it, if it has one.
    """

    grpc: StatusCode
    http: int
    kind: str
    migrates: bool = False
    free: bool = False
    blames_worker: bool = False
    retryable: bool = False
    hint: str | None
    openai_code: str | None = None


def _lost(hint: str) -> Traits:
    return Traits(
        grpc=StatusCode.UNAVAILABLE,
        http=502,
        kind="server_error",
        migrates=True,
        blames_worker=True,
        retryable=True,
        hint=hint,
    )


def _full(hint: str, *, migrates: bool) -> Traits:
    return Traits(
        grpc=StatusCode.RESOURCE_EXHAUSTED,
        http=503,
        kind="overloaded_error",
        migrates=migrates,
        free=migrates,
        retryable=True,
        hint=hint,
    )


def _request(http: int, grpc: StatusCode, hint: str | None, openai_code: str | None = None) -> Traits:
    return Traits(grpc=grpc, http=http, kind="invalid_request_error", hint=hint, openai_code=openai_code)


TRAITS: dict[Reason, Traits] = {
    Reason.CANNOT_CONNECT: _lost("No worker could be reached in time. Send the request again."),
    Reason.DISCONNECTED: _lost("The worker was lost. Send the request again."),
    Reason.STALLED: _lost("A worker, or a process of the frontend, stopped answering. Send the request again."),
    Reason.STREAM_INCOMPLETE: _lost("The worker ended the stream too early. Send the request again."),
    Reason.PROTOCOL_VIOLATION: _lost("The worker broke the protocol. Check that its version matches the frontend's."),
    Reason.ENGINE_DEAD: _lost("The worker's engine died. See the worker's log."),
    Reason.WORKER_AT_CAPACITY: _full("The worker is at capacity. Back off and send the request again.", migrates=True),
    Reason.DRAINING: Traits(
        grpc=StatusCode.UNAVAILABLE,
        http=503,
        kind="server_error",
        migrates=True,
        free=True,
        retryable=True,
        hint="The server is shutting down. Send the request again.",
    ),
    Reason.ENGINE_ERROR: Traits(
        grpc=StatusCode.INTERNAL,
        http=500,
        kind="server_error",
        retryable=True,
        hint="The engine failed on this request. See the worker's log.",
    ),
    Reason.POISON_REQUEST: Traits(
        grpc=StatusCode.INTERNAL,
        http=500,
        kind="server_error",
        hint="Two workers died while they ran this request. Do not send it again; see the workers' logs.",
    ),
    Reason.GRAMMAR_REPLAY_MISMATCH: Traits(
        grpc=StatusCode.INTERNAL,
        http=500,
        kind="server_error",
        hint="The answer so far does not match the grammar on another worker. Check that all workers are the same.",
    ),
    Reason.OVERLOADED: _full("No worker has room. Back off and send it again, or add workers.", migrates=False),
    Reason.NO_WORKERS: Traits(
        grpc=StatusCode.UNAVAILABLE,
        http=503,
        kind="server_error",
        retryable=True,
        hint="No worker can be used now. Wait, start one, or check that this frontend reaches a registry (--registry).",
    ),
    Reason.INVALID_ARGUMENT: _request(400, StatusCode.INVALID_ARGUMENT, None),
    Reason.BODY_TOO_LARGE: _request(413, StatusCode.RESOURCE_EXHAUSTED, "Send a smaller request."),
    Reason.PROMPT_TOO_LONG: _request(400, StatusCode.INVALID_ARGUMENT, "Shorten the prompt.", CONTEXT_LENGTH_EXCEEDED),
    Reason.MODEL_NOT_FOUND: _request(
        404, StatusCode.NOT_FOUND, "Ask for one of the models in /v1/models.", "model_not_found"
    ),
    Reason.DEADLINE_EXCEEDED: Traits(
        grpc=StatusCode.DEADLINE_EXCEEDED,
        http=504,
        kind="timeout_error",
        hint="Allow more time, or ask for fewer tokens.",
    ),
    Reason.CANCELLED: Traits(
        grpc=StatusCode.CANCELLED,
        http=499,
        kind="cancelled",
        hint="The client disconnected, or the request was cancelled by its id.",
    ),
    Reason.SLOW_CLIENT: Traits(
        grpc=StatusCode.RESOURCE_EXHAUSTED,
        http=503,
        kind="server_error",
        hint="Read the stream as fast as it is sent.",
    ),
    Reason.INSTANCE_NOT_FOUND: _request(
        404,
        StatusCode.NOT_FOUND,
        "Workers' ids are in their logs (`worker ready … instance=`) and in frontends' metrics (`worker_id`).",
    ),
    Reason.STORE_AWAY: Traits(
        grpc=StatusCode.UNAVAILABLE,
        http=503,
        kind="server_error",
        retryable=True,
        hint="The registry cannot reach its store. Back off and try again, on another registry if there is one.",
    ),
    Reason.TAKEN_OVER: _request(
        409, StatusCode.ABORTED, "Read the answer on the connection that resumed it last, or resume it again."
    ),
    Reason.STREAM_NOT_FOUND: _request(
        404, StatusCode.NOT_FOUND, "Only answers to requests with `x-on-disconnect: continue` can be resumed."
    ),
    Reason.STREAM_EXPIRED: _request(
        410, StatusCode.NOT_FOUND, "Come back within `x-detach-grace`, or send the request with the tokens you have."
    ),
    Reason.RESUME_DIVERGED: _request(
        409, StatusCode.ABORTED, "Send the request with the tokens you have (`generated_token_ids`), or begin anew."
    ),
    Reason.CURSOR_BEYOND_END: _request(416, StatusCode.OUT_OF_RANGE, "Send the last cursor that the server has sent."),
    Reason.UNAUTHENTICATED: Traits(
        grpc=StatusCode.UNAUTHENTICATED,
        http=401,
        kind="authentication_error",
        hint="Send a valid API key as `authorization: Bearer …` (over gRPC as metadata); to admin calls, their token.",
        openai_code="invalid_api_key",
    ),
    Reason.RATE_LIMITED: Traits(
        grpc=StatusCode.RESOURCE_EXHAUSTED,
        http=429,
        kind="rate_limit_error",
        retryable=True,
        hint="Come again when `Retry-After` says, or ask the operator for a higher limit.",
        openai_code="rate_limit_exceeded",
    ),
    Reason.INTERNAL: Traits(
        grpc=StatusCode.INTERNAL, http=500, kind="server_error", hint="This is a bug: report the request id."
    ),
}


class Failure(Exception):
    """A request failed.

    `detail`: one sentence for people, safe to show to the client. `param`: the field at fault, as the client spells it.
    `retry_after_s`: when to retry, in seconds, if that is known. `metadata`: more facts for programs, such as the
    limits behind a refusal; clients get it unchanged. `hint`: what a person should do, if it is not that of the reason;
    it does not travel inside the plane.
    """

    def __init__(
        self,
        reason: Reason,
        detail: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.param = param
        self.retry_after_s = retry_after_s
        self.metadata: Mapping[str, str] = metadata or {}
        self.hint = hint or TRAITS[reason].hint

    @property
    def traits(self) -> Traits:
        return TRAITS[self.reason]

    @property
    def shown_metadata(self) -> Mapping[str, str]:
        """The metadata that clients get: with OpenAI's `code` for the reason, if it has one."""
        code = self.traits.openai_code
        return self.metadata if code is None else {OPENAI_CODE: code, **self.metadata}

    def copy(self) -> "Failure":
        """The same failure for another request. One object raised by several tasks would collect their tracebacks."""
        return Failure(
            self.reason,
            self.detail,
            param=self.param,
            retry_after_s=self.retry_after_s,
            metadata=self.metadata,
            hint=self.hint,
        )

    def clear_tracebacks(self) -> None:
        """Drop the frames that the failure passed through. Called once it is answered.

        Frames and failure refer to each other, with hundreds of objects for each request. Without this they stay until
        a garbage collection, which pauses every stream.
        """
        error: BaseException | None = self
        while error is not None:
            error.__traceback__ = None
            error = error.__context__

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


def invalid(param: str, detail: str) -> Failure:
    """The failure of a request whose field `param` is wrong; `detail` says what to change."""
    return Failure(Reason.INVALID_ARGUMENT, detail, param=param)


def quoted(given: str) -> str:
    """A client's text for use in a detail: in quotes, and shortened to QUOTED_CHARACTERS_MAX."""
    return repr(given[:QUOTED_CHARACTERS_MAX])


def shown(given: int) -> str:
    """A client's integer for use in a detail. In JSON it may have thousands of digits."""
    return str(given)[:QUOTED_CHARACTERS_MAX]


REJECTIONS = frozenset({Reason.WORKER_AT_CAPACITY, Reason.OVERLOADED})
CAUSE = "cause"
"""The key of `RefusedFor` in a failure's metadata."""


class RefusedFor(StrEnum):
    """The bound behind a refusal.

    CAPACITY: requests that run and wait. BUSY_THRESHOLD: every worker with room is over a busy threshold. QUEUE_TOKENS:
    prompt tokens that wait. QUEUE_TIMEOUT: how long a request may wait. TENANT_SHARE: what a tenant may hold of a full
    queue when others hold less, so that its newest waiting request gives way. PREPARATION: requests that are prepared
    in threads and helper processes, before they count as any of the others. CONNECTIONS: connections that the limit of
    open files allows.
    """

    CAPACITY = "capacity"
    BUSY_THRESHOLD = "busy_threshold"
    QUEUE_TOKENS = "queue_tokens"
    QUEUE_TIMEOUT = "queue_timeout"
    TENANT_SHARE = "tenant_share"
    PREPARATION = "preparation"
    CONNECTIONS = "connections"


_BY_NAME = {one.value: one for one in RefusedFor}


def refused_for(failure: Failure) -> RefusedFor:
    """The bound behind a refusal; CAPACITY if the failure names none, or one that this version does not know."""
    return _BY_NAME.get(failure.metadata.get(CAUSE, ""), RefusedFor.CAPACITY)


RETRY_AFTER_S_MIN = 1.0
"""The default as well: by then the marks of full workers have expired."""
RETRY_AFTER_S_MAX = 60.0
"""OpenAI's own clients ignore a longer time."""
JITTER_MIN, JITTER_MAX = 0.8, 1.2
"""Spreads the retries of clients that were refused together."""


def wait_for_slot_s(waiting: int, service_s: float, slots: int) -> float:
    """How long a request that queues now waits for a slot on a worker, on average.

    `waiting`: the requests before it. `service_s`: how long a request holds one of the N `slots`. Slots that are all
    taken become free at a rate of N per service time, so it takes (waiting + 1) * service_s / N.
    """
    return (waiting + 1) * service_s / slots


def jittered_s(seconds: float, rng: random.Random) -> float:
    """A random time around `seconds`, from RETRY_AFTER_S_MIN to RETRY_AFTER_S_MAX; also spread at these bounds."""
    middle_s = min(max(seconds, RETRY_AFTER_S_MIN / JITTER_MIN), RETRY_AFTER_S_MAX / JITTER_MAX)
    return middle_s * rng.uniform(JITTER_MIN, JITTER_MAX)
