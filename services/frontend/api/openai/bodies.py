"""The request bodies of OpenAI's endpoints, and their conversion to a `Request`.

A field is added here, with its type from field_types.py. Types are checked here; ranges are checked by the preprocess
layer, for gRPC as well.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, cast

from msgspec import Meta, Struct
from msgspec.structs import replace

from services.core.errors import Failure, invalid, quoted, shown
from services.core.request import Guided, Message, Request, Sampling, Stop
from services.core.validation import ANSWERS_MAX, COUNT_MAX, LOGPROBS_MAX, MESSAGES_MAX
from services.frontend.api.field_types import (
    NO_LIMIT,
    SEED_MIN,
    SEED_RANDOM,
    TOKEN_ID,
    TOP_K_ALL,
    ChoiceCount,
    FrequencyPenalty,
    GeneratedTokenIds,
    LogitBias,
    LogprobsCount,
    MaxTokens,
    MinP,
    MinTokens,
    NotEmpty,
    PartKind,
    PresencePenalty,
    Prompts,
    RepetitionPenalty,
    Role,
    Seed,
    SpeakerName,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
)
from services.frontend.api.openai.guided import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    TgiGrammar,
    guided_of,
    only_one,
    top_level_guided,
)

COMPLETION_TOKENS_DEFAULT = 16
"""OpenAI's documented default of `max_tokens` for /v1/completions."""

LIMITS = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
"""OpenAI's two names, llama.cpp's and Hugging Face's for the most tokens of an answer."""

_WORDS = ("prompt", "guided")
"""Fields of Request that are plain words in a failure's detail."""


class StreamOptions(Struct, frozen=True, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(Struct, frozen=True, kw_only=True):
    """The fields that both endpoints take."""

    model: NotEmpty
    n: ChoiceCount | None = None
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    n_predict: MaxTokens | None = None
    max_new_tokens: MaxTokens | None = None
    min_tokens: MinTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    grammar: str | TgiGrammar | None = None
    ebnf: str | None = None
    generated_token_ids: GeneratedTokenIds | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | int | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer is sent as events."""
        return bool(self.stream)

    @property
    def is_echoed(self) -> bool:
        """Whether each choice begins with its prompt."""
        return False

    @property
    def includes_usage(self) -> bool:
        """Whether a streamed answer ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_usage_in_events(self) -> bool:
        """Whether each event of a streamed answer has the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def to_request(self) -> Request:
        """The request that the body describes. Raises Failure(INVALID_ARGUMENT)."""
        self._check_stream_options()
        common = Request(
            model=self.model,
            n=1 if self.n is None else self.n,
            logprobs=self._logprobs(),
            guided=only_one(self._guided()),
            sampling=self._sampling(),
            stop=self._stop(),
        )
        parts = tuple(replace(common, **prompt) for prompt in self._prompts())
        if self.generated_token_ids:
            parts = _continued(parts, self.generated_token_ids)
        return parts[0] if len(parts) == 1 else replace(common, parts=parts)

    def _prompts(self) -> list[dict[str, Any]]:
        """The prompts, at least one, each as fields of a Request. Raises Failure(INVALID_ARGUMENT)."""
        raise NotImplementedError

    def _logprobs(self) -> int | None:
        """How many of the likeliest tokens get log probabilities as well; None: no token gets any."""
        raise NotImplementedError

    def _limit(self) -> int | None:
        """The most tokens of an answer, or NO_LIMIT; None: the client gives none. Raises Failure(INVALID_ARGUMENT)."""
        if self.max_completion_tokens is None and self.n_predict is None and self.max_new_tokens is None:
            return self.max_tokens  # The usual case, without a dict.
        limits = self._limits()
        if len(set(limits.values())) > 1:
            first, second, *_ = limits
            raise invalid(first, f"{first} and {second} mean the same: give one of them, or equal values")
        return next(iter(limits.values()), None)

    def _limits(self) -> dict[str, int]:
        """The limit by each of its names that is given."""
        return {name: value for name in LIMITS if (value := getattr(self, name)) is not None}

    def _limit_default(self) -> int | None:
        """The limit for clients that say nothing; None: the context length alone."""
        return None

    def _check_stream_options(self) -> None:
        if (self.includes_usage or self.has_usage_in_events) and not self.stream:
            raise invalid("stream_options", "stream_options needs stream: set stream to true or leave it out")

    def _sampling(self) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=_top_k(self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=None if self.seed is None else _seed(self.seed),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_logit_bias(self.logit_bias) if self.logit_bias else (),
        )

    def name_fields(self, failure: Failure) -> None:
        """Name the fields in a failure's param and detail as the client does."""
        for ours, theirs in self._client_names().items():
            if failure.param is not None and f"{failure.param}.".startswith(f"{ours}."):
                failure.param = theirs + failure.param.removeprefix(ours)
            if ours not in _WORDS:
                failure.detail = re.sub(rf"(?<![\w.]){re.escape(ours)}\b", theirs, failure.detail, count=1)

    def _client_names(self) -> dict[str, str]:
        """Field of Request → this body's name for it, where they differ."""
        names: dict[str, str] = {}
        if guided := self._guided():
            name, form = next(iter(guided.items()))
            names |= {f"guided.{form.kind}": name, "guided": name}
        if self.max_tokens is None and (limits := self._limits()):
            names["max_tokens"] = next(iter(limits))
        if self.generated_token_ids:
            names["generated_choices"] = "generated_token_ids"
        return names

    def _guided(self) -> dict[str, Guided]:
        guided = guided_of("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if self.structured_outputs is not None:
            guided |= self.structured_outputs.to_guided()
        if self.response_format is not None:
            guided |= self.response_format.to_guided()
        guided |= top_level_guided(self.json_schema, self.regex, self.grammar, self.ebnf)
        return guided

    def _stop(self) -> Stop:
        limit = self._limit()
        return Stop(
            strings=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            max_tokens=None if limit == NO_LIMIT else limit,
            max_tokens_default=self._limit_default() if limit is None else None,
        )


class CompletionBody(Body, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: NotEmpty | Prompts
    logprobs: LogprobsCount | None = None
    echo: bool | None = None

    @property
    def is_echoed(self) -> bool:
        return bool(self.echo)

    def _logprobs(self) -> int | None:
        if self.echo and self.logprobs is not None:
            raise invalid("echo", "echo with logprobs is not supported in this version: leave one of them out")
        return self.logprobs

    def _limit_default(self) -> int | None:
        return COMPLETION_TOKENS_DEFAULT

    def _prompts(self) -> list[dict[str, Any]]:
        if isinstance(self.prompt, str):
            return [{"text": self.prompt}]
        kinds = {type(item) for item in self.prompt}
        if not kinds:
            raise invalid("prompt", "prompt is empty: give a string or a list of token ids")
        if kinds != {int} and len(self.prompt) > ANSWERS_MAX:
            raise invalid("prompt", f"prompt has {len(self.prompt)} prompts: send {ANSWERS_MAX} at most")
        if kinds == {str}:
            return [{"text": text} for text in self.prompt]
        if kinds == {int}:
            return [{"token_ids": tuple(self.prompt)}]
        if kinds == {list}:
            return [{"token_ids": tuple(token_ids)} for token_ids in cast("list[list[int]]", self.prompt)]
        raise invalid("prompt", "prompt mixes strings, token ids and lists of them: send lists of one kind")


class Part(Struct, frozen=True, kw_only=True, gc=False):
    """A part of a message. Only text is supported in this version."""

    type: PartKind
    text: str | None = None


class ChatMessage(Struct, frozen=True, kw_only=True, gc=False):
    """One message of a conversation."""

    role: Role
    content: str | list[Part] | None = None
    name: SpeakerName | None = None

    def to_message(self, path: str) -> Message:
        """The message with the texts of its parts joined. `path`: names it. Raises Failure(INVALID_ARGUMENT)."""
        if self.content is None:
            raise invalid(f"{path}.content", f"{path}.content is required: give a string or a list of text parts")
        content = self.content
        if not isinstance(content, str):
            content = "".join(_text(part, f"{path}.content[{i}]") for i, part in enumerate(content))
        return Message(self.role, content, self.name or "")


class ChatBody(Body, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MESSAGES_MAX, extra_json_schema={"minItems": 1})]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: set logprobs to true or leave it out")
        return None

    def _client_names(self) -> dict[str, str]:
        return {**super()._client_names(), "prompt": "messages"}

    def _prompts(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise invalid("messages", "messages is empty: give at least one message")
        return [{"messages": tuple(message.to_message(f"messages[{i}]") for i, message in enumerate(self.messages))}]


def _continued(parts: tuple[Request, ...], given: GeneratedTokenIds) -> tuple[Request, ...]:
    """The prompts with the tokens that the client has of their choices. Raises Failure(INVALID_ARGUMENT)."""
    name, n = "generated_token_ids", parts[0].n
    count = len(parts) * n
    flat = [item for item in given if isinstance(item, int)]
    if flat:
        if len(flat) < len(given):
            raise invalid(name, f"{name} mixes token ids and lists of them: send lists of one kind")
        if count > 1:
            raise invalid(
                name, f"{name} is one list for {shown(count)} choices: give a list for each, null if it is complete"
            )
        return (replace(parts[0], generated_token_ids=tuple(flat)),)
    if len(given) != count:
        asked = f"{name} has {len(given)} lists for {shown(count)} choices"
        raise invalid(name, f"{asked}: give a list for each, prompt by prompt, null if it is complete")
    choices = [tuple(item) if isinstance(item, list) else None for item in given]
    return tuple(part.continued(tuple(choices[i * n : (i + 1) * n])) for i, part in enumerate(parts))


def _top_k(given: int) -> int:
    """-1 is vLLM's older value for "all tokens", as is any number beyond those of a vocabulary."""
    return 0 if given == TOP_K_ALL else min(given, COUNT_MAX)


def _seed(given: int) -> int | None:
    """-1 asks for another seed each time, as in vLLM, llama.cpp and LM Studio. Others below 0: their 64 bits."""
    if given == SEED_RANDOM:
        return None
    return given + 2**64 if SEED_MIN <= given < 0 else given


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in biases:
        if not TOKEN_ID.fullmatch(key) or int(key) >= 2**32:
            raise invalid("logit_bias", f"logit_bias: {quoted(key)} is not a token id")
    by_token = {int(key): bias for key, bias in biases.items()}
    if len(by_token) != len(biases):
        raise invalid("logit_bias", "logit_bias names a token twice, such as 5 and 05: give it once")
    return tuple(by_token.items())


def _text(part: Part, path: str) -> str:
    if part.type != "text":
        raise invalid(f"{path}.type", f"{path}.type {quoted(part.type)} is not supported in this version: send text")
    if part.text is None:
        raise invalid(f"{path}.text", f"{path}.text is required: add it")
    return part.text
