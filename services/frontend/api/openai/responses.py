"""Builds the answers of OpenAI's endpoints from what a request has produced: whole bodies, and chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from services.core.call import Told
from services.core.interface import Delta, Usage
from services.core.model_card import ModelCard
from services.core.request import Continuation, FinishReason, Request
from services.frontend.api.openai import schemas
from services.frontend.api.openai.logprobs import (
    ChatLogprobsWriter,
    CompletionLogprobsWriter,
    LogprobsWriter,
)
from services.frontend.api.openai.unary import Collected
from services.frontend.layers.detokenize import Detokenizer
from services.models.tokenizers import Vocabulary


class Echo:
    """The prompts of a request with `echo`, which each choice begins with."""

    def __init__(self, request: Request, vocabulary: Callable[[], Vocabulary], texts: Sequence[str] = ()) -> None:
        """`request`: as the client sent it. `vocabulary`: returns the vocabulary of its model.

        `texts`: of the prompts, if the request has only their token ids.
        """
        self._prompts = request.parts or (request,)
        self._texts = texts
        self._n = request.n
        self._vocabulary = vocabulary

    def text_of(self, index: int) -> str:
        """The prompt of the choice `index`, in which special tokens are spelled out whether it is text or token ids.

        A single token that is a part of a character becomes U+FFFD. Empty if the client brought tokens of the choice,
        before which it has the prompt.
        """
        prompt = self._prompts[index // self._n]
        if prompt.generated_of(index % self._n):
            return ""
        return self._text_of(index // self._n)

    def texts(self) -> Sequence[str]:
        """The prompts."""
        return [self._text_of(number) for number in range(len(self._prompts))]

    def _text_of(self, number: int) -> str:
        if self._texts:
            return self._texts[number]
        prompt = self._prompts[number]
        if prompt.text is not None:
            return prompt.text
        vocabulary = self._vocabulary()
        token_bytes, special_tokens = vocabulary.token_bytes, vocabulary.special_tokens
        spelled = [token_bytes[token] or special_tokens.get(token, "").encode() for token in prompt.prompt_token_ids]
        return b"".join(spelled).decode(errors="replace")


class Brought:
    """The tokens that a client brought with its request, for each choice: the answer continues after them."""

    def __init__(self, request: Request) -> None:
        """`request`: as the client sent it."""
        self._prompts = request.parts or (request,)
        self._n = request.n

    def token_ids_of(self, index: int) -> tuple[int, ...]:
        return self._prompts[index // self._n].generated_of(index % self._n)

    def text_of(self, index: int, vocabulary: Vocabulary) -> str:
        """The text that the client has of the choice, without what is held back after its tokens."""
        stop = self._prompts[index // self._n].stop
        detokenizer = Detokenizer(_Nowhere(), vocabulary, stop.strings, stop.min_tokens)
        return detokenizer.prime(self.token_ids_of(index))


class _Nowhere:
    """A sink to which nothing is delivered."""

    def deliver(self, delta: Delta) -> None:
        raise AssertionError("a detokenizer delivers nothing while it is primed")


@dataclass(slots=True, kw_only=True)
class Answer(ABC):
    """One answer of an endpoint: what all its parts have in common, and the types that they are made of.

    `n`: choices of each prompt. `brought`: the tokens that the client has already; None: it has none.
    `returns_token_ids`: of choices and prompts. `told`: has the prompts once the first token comes.
    """

    request_id: str
    model: str
    generation_id: str | None = None
    n: int = 1
    includes_usage: bool = False
    has_usage_in_events: bool = False
    returns_token_ids: bool = False
    told: Told = field(default_factory=Told)
    echo: Echo | None = None
    brought: Brought | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def body(self, choices: Mapping[int, Collected], usage: Usage, vocabulary: Vocabulary | None = None) -> Struct:
        """The whole answer. `vocabulary`: needed for log probabilities."""

    @abstractmethod
    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        """The answer as far as it came before it failed."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | None = None, prompt: list[int] | UnsetType = UNSET) -> Struct:
        """The data of one event. `usage`: if the client asked for it, on the last event or on each. `prompt`: the token
        ids of the choice's prompt, if the client asked for them, on the first event of the choice.
        """

    @abstractmethod
    def opening(self, index: int) -> Struct | None:
        """The choice of the event that comes before a choice's first text; None: there is no such event."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: Any = None) -> Struct:
        """The choice of an event with new text."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason, continuation: Continuation | None = None) -> Struct:
        """The choice of the event that ends a choice."""

    @abstractmethod
    def joined(self, delta: Delta, logprobs: Any, *, is_first: bool) -> Any:
        """The choice of an event that is all of `opening`, `piece` and `finish` that apply to a delta."""

    @abstractmethod
    def logprobs_writer(self, index: int, vocabulary: Vocabulary) -> LogprobsWriter:
        """A writer for the log probabilities of one choice."""

    def brought_count(self, index: int) -> int:
        """How many tokens of a choice the client brought."""
        return 0 if self.brought is None else len(self.brought.token_ids_of(index))

    def prompt_of(self, index: int) -> list[int] | UnsetType:
        """The token ids of a choice's prompt, if the client asked for them."""
        return list(self.told.prompts[index // self.n]) if self.returns_token_ids else UNSET

    def _token_ids(self, choice: Collected) -> list[int] | UnsetType:
        return choice.token_ids if self.returns_token_ids else UNSET

    def _chunk_usage(self, usage: Usage | None) -> schemas.Usage | UnsetType | None:
        """A client that asked for usage gets null on events without it; others do not get the field."""
        if usage is not None:
            return _usage(usage)
        return None if self.includes_usage else UNSET

    def _logprobs(self, index: int, choice: Collected, vocabulary: Vocabulary | None) -> Any:
        if not choice.logprobs:
            return None
        assert vocabulary is not None, "the endpoint passes it with log probabilities"
        writer = self.logprobs_writer(index, vocabulary)
        return writer.write(choice.token_ids, choice.logprobs, choice.text, is_last=True)


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    __slots__ = ()

    def body(self, choices: Mapping[int, Collected], usage: Usage, vocabulary: Vocabulary | None = None) -> Struct:
        written = [
            schemas.CompletionChoice(
                index=index,
                text=self._whole_text(index, choice),
                logprobs=self._logprobs(index, choice, vocabulary),
                finish_reason=choice.finish_reason,
                continuation=choice.continuation or UNSET,
                token_ids=self._token_ids(choice),
                prompt_token_ids=self.prompt_of(index),
            )
            for index, choice in choices.items()
        ]
        return self._completion(written, _usage(usage))

    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        return {
            "choices": [
                schemas.PartialCompletionChoice(
                    index=index,
                    text=self._whole_text(index, choice),
                    finish_reason=choice.finish_reason,
                    token_ids=self._token_ids(choice),
                )
                for index, choice in choices.items()
            ]
        }

    def chunk(
        self,
        choices: list[schemas.CompletionChoice],
        usage: Usage | None = None,
        prompt: list[int] | UnsetType = UNSET,
    ) -> Struct:
        for choice in choices:
            choice.prompt_token_ids = prompt
        return self._completion(choices, self._chunk_usage(usage))

    def opening(self, index: int) -> Struct | None:
        text = "" if self.echo is None else self.echo.text_of(index)
        return self.piece(index, text) if text else None

    def piece(self, index: int, text: str, logprobs: schemas.CompletionLogprobs | None = None) -> Struct:
        return schemas.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)

    def finish(self, index: int, reason: FinishReason, continuation: Continuation | None = None) -> Struct:
        return schemas.CompletionChoice(
            index=index, text="", logprobs=None, finish_reason=reason, continuation=continuation or UNSET
        )

    def joined(self, delta: Delta, logprobs: Any, *, is_first: bool) -> Any:
        text = delta.text
        if is_first and self.echo is not None:
            text = self.echo.text_of(delta.choice) + text
        return schemas.CompletionChoice(
            index=delta.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            continuation=delta.continuation or UNSET,
        )

    def logprobs_writer(self, index: int, vocabulary: Vocabulary) -> LogprobsWriter:
        writer = CompletionLogprobsWriter(vocabulary)
        if self.brought is not None:
            writer.prime(self.brought.token_ids_of(index), self.brought.text_of(index, vocabulary))
        return writer

    def _completion(
        self, choices: list[schemas.CompletionChoice], usage: schemas.Usage | UnsetType | None
    ) -> schemas.Completion:
        return schemas.Completion(
            id=f"cmpl-{self.generation_id or self.request_id}",
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _whole_text(self, index: int, choice: Collected) -> str:
        return choice.text if self.echo is None else self.echo.text_of(index) + choice.text


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    __slots__ = ()

    def body(self, choices: Mapping[int, Collected], usage: Usage, vocabulary: Vocabulary | None = None) -> Struct:
        return schemas.ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(index, choice, vocabulary) for index, choice in choices.items()],
            usage=_usage(usage),
            prompt_token_ids=self.prompt_of(0),
        )

    def _choice(self, index: int, choice: Collected, vocabulary: Vocabulary | None) -> schemas.ChatChoice:
        assert choice.finish_reason is not None, "an answer is whole once all its choices have ended"
        return schemas.ChatChoice(
            index=index,
            message=_message(choice),
            logprobs=self._logprobs(index, choice, vocabulary),
            finish_reason=choice.finish_reason,
            continuation=choice.continuation or UNSET,
            token_ids=self._token_ids(choice),
        )

    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        return {
            "choices": [
                schemas.PartialChatChoice(
                    index=index,
                    message=_message(choice),
                    finish_reason=choice.finish_reason,
                    token_ids=self._token_ids(choice),
                )
                for index, choice in choices.items()
            ]
        }

    def chunk(
        self,
        choices: list[schemas.ChatChunkChoice],
        usage: Usage | None = None,
        prompt: list[int] | UnsetType = UNSET,
    ) -> Struct:
        return schemas.ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._chunk_usage(usage),
            prompt_token_ids=prompt,
        )

    def opening(self, index: int) -> Struct | None:
        return _chat_piece(index, schemas.ChatDelta(role="assistant", content=""))

    def piece(self, index: int, text: str, logprobs: schemas.ChatLogprobs | None = None) -> Struct:
        return _chat_piece(index, schemas.ChatDelta(content=text), logprobs)

    def finish(self, index: int, reason: FinishReason, continuation: Continuation | None = None) -> Struct:
        delta = schemas.ChatDelta()
        return schemas.ChatChunkChoice(
            index=index, delta=delta, logprobs=None, finish_reason=reason, continuation=continuation or UNSET
        )

    def joined(self, delta: Delta, logprobs: Any, *, is_first: bool) -> Any:
        if is_first and not self.brought_count(delta.choice):
            content = schemas.ChatDelta(role="assistant", content=delta.text)
        else:
            content = schemas.ChatDelta(content=delta.text) if delta.text else schemas.ChatDelta()
        return schemas.ChatChunkChoice(
            index=delta.choice,
            delta=content,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            continuation=delta.continuation or UNSET,
        )

    def logprobs_writer(self, index: int, vocabulary: Vocabulary) -> LogprobsWriter:
        return ChatLogprobsWriter(vocabulary)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.generation_id or self.request_id}"


def _chat_piece(
    index: int, delta: schemas.ChatDelta, logprobs: schemas.ChatLogprobs | None = None
) -> schemas.ChatChunkChoice:
    return schemas.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)


def _message(choice: Collected) -> schemas.AssistantMessage:
    return schemas.AssistantMessage(role="assistant", content=choice.text, refusal=None)


def _usage(usage: Usage) -> schemas.Usage:
    return schemas.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def model_object(card: ModelCard, created: int) -> schemas.Model:
    """One model of /v1/models."""
    return schemas.Model(
        id=card.model, object="model", created=created, owned_by="unbroken", max_model_len=card.context_length
    )


def model_list(cards: Sequence[ModelCard], created: int) -> schemas.ModelList:
    """The body of /v1/models."""
    return schemas.ModelList(object="list", data=[model_object(card, created) for card in cards])
