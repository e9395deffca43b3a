"""The bodies of OpenAI's answers: responses are encoded from these types, and the OpenAPI document describes them.

The order of fields is their order on the wire. UNSET: the field is left out.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from services.core.request import Continuation, FinishReason


class Usage(Struct, kw_only=True, gc=False):
    """Token counts of one answer, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Struct, kw_only=True):
    """Log probabilities of a choice; in a stream, of the tokens of one event.

    tokens: their texts, or the spellings of special tokens. top_logprobs: the likeliest tokens and the token itself; of
    several with the same text all but one are named `token_id:` and their id. text_offset: where the token begins in
    the text of the whole choice, in characters; never beyond its end, where the tokens of a stop string are.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    """finish_reason: null until the choice's last event.

    token_ids, prompt_token_ids: if `return_token_ids` asks for them; in a stream, the ids of one event, and the prompt
    in the choice's first event. continuation: see ChatChoice.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    continuation: Continuation | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A whole answer, or one event of a stream. usage: in a stream only if `stream_options` asks for it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(Struct, kw_only=True, gc=False):
    """A likely token at a position.

    token: its text, or the spelling of a special token. bytes: its text in UTF-8, which may be a part of a character;
    null for a special token, which has no part in the text.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob, kw_only=True, gc=False):
    """A token of the answer, and the likeliest tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    """Log probabilities of a choice; in a stream, of the tokens of one event."""

    content: list[ChatTokenLogprob]
    refusal: None


class AssistantMessage(Struct, kw_only=True):
    """refusal: always null. OpenAI's API requires the field, and clients in typed languages rely on it."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Struct, kw_only=True):
    """One of `n` answers.

    continuation: only if the answer moved to another worker whose engine could not draw the same tokens; it goes on
    after the tokens that were delivered, with the same distribution. token_ids: if `return_token_ids` asks for them.
    """

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    continuation: Continuation | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """A whole answer. prompt_token_ids: if `return_token_ids` asks for them."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    """What an event adds to the message. The first one of a choice has the role, the last one is empty."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, kw_only=True):
    """finish_reason: null until the choice's last event. continuation: see ChatChoice. token_ids: of this event."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    continuation: Continuation | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Struct, kw_only=True):
    """One event of a stream. usage: only if `stream_options` asks for it. prompt_token_ids: in the first event of each
    choice, if `return_token_ids` asks for them.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class PartialCompletionChoice(Struct, kw_only=True):
    """One choice of an answer that failed, as far as it came. finish_reason: null if the choice had not ended."""

    index: int
    text: str
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class PartialChatChoice(Struct, kw_only=True):
    """One choice of an answer that failed, as far as it came. finish_reason: null if the choice had not ended."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET


class Model(Struct, kw_only=True):
    """max_model_len: the most tokens of prompt and answer together, under vLLM's name for it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """All models that can be served now."""

    object: Literal["list"]
    data: list[Model]


class Cancelled(Struct, kw_only=True):
    """cancelled: how many running requests had this id."""

    id: str
    cancelled: int
