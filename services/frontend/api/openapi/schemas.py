"""The shapes of answers, for the OpenAPI document: written by other modules, described here."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field


class Usage(Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Struct, kw_only=True):
    """Of a choice, or in a stream of the tokens of one event."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """finish_reason: null until the choice's last event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(Struct, kw_only=True):
    """A whole answer, or one event of a stream. usage: in a stream only where `stream_options` asks for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class Rival(Struct, kw_only=True):
    """A token that might have come; bytes: of its text, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(Rival, kw_only=True):
    """A token that came, and the likeliest in its place."""

    top_logprobs: list[Rival]


class ChatLogprobs(Struct, kw_only=True):
    content: list[ChatToken]
    refusal: None


class Reply(Struct, kw_only=True):
    """refusal: always null, for clients of typed languages, where OpenAI's API says that it is there."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct, kw_only=True):
    index: int
    message: Reply
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(Struct, kw_only=True):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ReplyPiece(Struct, kw_only=True):
    """What is new. The first piece of a choice has the role, the last is empty."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """finish_reason: null until the choice's last event."""

    index: int
    delta: ReplyPiece
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class ChatCompletionChunk(Struct, kw_only=True):
    """One event of a stream. usage: only where `stream_options` asks for it."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class Model(Struct, kw_only=True):
    """max_model_len: the most tokens of prompt and answer together."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Cancelled(Struct, kw_only=True):
    """cancelled: how many requests of that name were under way."""

    id: str
    cancelled: int


class Live(Struct, kw_only=True):
    status: Literal["live"]


class Ready(Struct, kw_only=True):
    status: Literal["ready"]
    models: list[str]


class ModelThresholds(Struct, kw_only=True):
    """null: not looked at."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None


class ChangedThresholds(ModelThresholds, kw_only=True):
    """What counts from now on. admission_control: none: nothing is refused for it."""

    admission_control: Literal["none", "token-capacity"]


class AllThresholds(Struct, kw_only=True):
    thresholds: list[ModelThresholds]
    admission_control: Literal["none", "token-capacity"]


class Complaint(Struct, kw_only=True):
    """type, code and metadata are for programs, message and hint for people.

    param: the field at fault. partial: what had come, for a client that asks with X-Return-Partial.
    """

    message: str
    type: str
    code: str
    param: str | None
    retryable: bool
    hint: str | None
    request_id: str
    metadata: dict[str, str] | UnsetType = UNSET
    partial: dict[str, Any] | UnsetType = UNSET


class Error(Struct, kw_only=True):
    """How every failure looks; in a stream that has begun, the data of an event `error`."""

    error: Complaint


class Document(Struct, kw_only=True):
    """This document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any] = field(default_factory=dict)
