"""Builds the answers of OpenAI's endpoints from what a request has produced: whole bodies, and chunks of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from services.core.interface import Usage
from services.core.model_card import ModelCard
from services.core.request import FinishReason, Request
from services.frontend.api.openai import schemas
from services.frontend.api.openai.logprobs import (
    ChatLogprobsWriter,
    CompletionLogprobsWriter,
    LogprobsWriter,
)
from services.frontend.api.openai.unary import Collected
from services.models.tokenizers import Vocabulary


class Echo:
    """The prompts of a request with `echo`, which each choice begins with."""

    def __init__(self, request: Request, vocabulary: Callable[[], Vocabulary]) -> None:
        """`request`: as the client sent it. `vocabulary`: returns the vocabulary of its model."""
        self._prompts = request.parts or (request,)
        self._n = request.n
        self._vocabulary = vocabulary

    def text_of(self, index: int) -> str:
        """The prompt of the choice `index`, in which special tokens are spelled out whether it is text or token ids.

        A single token that is a part of a character becomes U+FFFD.
        """
        prompt = self._prompts[index // self._n]
        if prompt.text is not None:
            return prompt.text
        vocabulary = self._vocabulary()
        token_bytes, special_tokens = vocabulary.token_bytes, vocabulary.special_tokens
        spelled = [token_bytes[token] or special_tokens.get(token, "").encode() for token in prompt.prompt_token_ids]
        return b"".join(spelled).decode(errors="replace")


@dataclass(slots=True, kw_only=True)
class Answer(ABC):
    """One answer of an endpoint: what all its parts have in common, and the types that they are made of."""

    request_id: str
    model: str
    includes_usage: bool = False
    has_usage_in_events: bool = False
    echo: Echo | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @abstractmethod
    def body(self, choices: Mapping[int, Collected], usage: Usage, vocabulary: Vocabulary | None = None) -> Struct:
        """The whole answer. `vocabulary`: needed for log probabilities."""

    @abstractmethod
    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        """The answer as far as it came before it failed."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | None = None) -> Struct:
        """The data of one event. `usage`: if the client asked for it, on the last event or on each."""

    @abstractmethod
    def opening(self, index: int) -> Struct | None:
        """The choice of the event that comes before a choice's first text; None: there is no such event."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: Any = None) -> Struct:
        """The choice of an event with new text."""

    @abstractmethod
    def finish(self, index: int, reason: FinishReason) -> Struct:
        """The choice of the event that ends a choice."""

    @abstractmethod
    def logprobs_writer(self, vocabulary: Vocabulary) -> LogprobsWriter:
        """A writer for the log probabilities of one choice."""

    def _chunk_usage(self, usage: Usage | None) -> schemas.Usage | UnsetType | None:
        """A client that asked for usage gets null on events without it; others do not get the field."""
        if usage is not None:
            return _usage(usage)
        return None if self.includes_usage else UNSET

    def _logprobs(self, choice: Collected, vocabulary: Vocabulary | None) -> Any:
        if not choice.logprobs:
            return None
        assert vocabulary is not None, "the endpoint passes it with log probabilities"
        return self.logprobs_writer(vocabulary).write(choice.token_ids, choice.logprobs, choice.text, is_last=True)


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    __slots__ = ()

    def body(self, choices: Mapping[int, Collected], usage: Usage, vocabulary: Vocabulary | None = None) -> Struct:
        written = [
            schemas.CompletionChoice(
                index=index,
                text=self._whole_text(index, choice),
                logprobs=self._logprobs(choice, vocabulary),
                finish_reason=choice.finish_reason,
            )
            for index, choice in choices.items()
        ]
        return self._completion(written, _usage(usage))

    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        return {
            "choices": [
                schemas.PartialCompletionChoice(
                    index=index, text=self._whole_text(index, choice), finish_reason=choice.finish_reason
                )
                for index, choice in choices.items()
            ]
        }

    def chunk(self, choices: list[schemas.CompletionChoice], usage: Usage | None = None) -> Struct:
        return self._completion(choices, self._chunk_usage(usage))

    def opening(self, index: int) -> Struct | None:
        return None if self.echo is None else self.piece(index, self.echo.text_of(index))

    def piece(self, index: int, text: str, logprobs: schemas.CompletionLogprobs | None = None) -> Struct:
        return schemas.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)

    def finish(self, index: int, reason: FinishReason) -> Struct:
        return schemas.CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)

    def logprobs_writer(self, vocabulary: Vocabulary) -> LogprobsWriter:
        return CompletionLogprobsWriter(vocabulary)

    def _completion(
        self, choices: list[schemas.CompletionChoice], usage: schemas.Usage | UnsetType | None
    ) -> schemas.Completion:
        return schemas.Completion(
            id=f"cmpl-{self.request_id}",
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
        )

    def _choice(self, index: int, choice: Collected, vocabulary: Vocabulary | None) -> schemas.ChatChoice:
        assert choice.finish_reason is not None, "an answer is whole once all its choices have ended"
        return schemas.ChatChoice(
            index=index,
            message=_message(choice),
            logprobs=self._logprobs(choice, vocabulary),
            finish_reason=choice.finish_reason,
        )

    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        return {
            "choices": [
                schemas.PartialChatChoice(index=index, message=_message(choice), finish_reason=choice.finish_reason)
                for index, choice in choices.items()
            ]
        }

    def chunk(self, choices: list[schemas.ChatChunkChoice], usage: Usage | None = None) -> Struct:
        return schemas.ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._chunk_usage(usage),
        )

    def opening(self, index: int) -> Struct | None:
        return _chat_piece(index, schemas.ChatDelta(role="assistant", content=""))

    def piece(self, index: int, text: str, logprobs: schemas.ChatLogprobs | None = None) -> Struct:
        return _chat_piece(index, schemas.ChatDelta(content=text), logprobs)

    def finish(self, index: int, reason: FinishReason) -> Struct:
        return schemas.ChatChunkChoice(index=index, delta=schemas.ChatDelta(), logprobs=None, finish_reason=reason)

    def logprobs_writer(self, vocabulary: Vocabulary) -> LogprobsWriter:
        return ChatLogprobsWriter(vocabulary)

    @property
    def _id(self) -> str:
        return f"chatcmpl-{self.request_id}"


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
