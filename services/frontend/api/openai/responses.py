"""The bodies of answers, as OpenAI has them: whole, or as the events of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.core.interface import Usage
from services.core.model_card import ModelCard
from services.core.request import FinishReason
from services.frontend.api.openai.logprobs import ChatLogprobs, CompletionLogprobs, LogprobsWriter
from services.frontend.api.openai.unary import Collected, Echo

DONE = b"data: [DONE]\n\n"
_TEXT = "\0"
_TEXT_ENCODED = msgspec.json.encode(_TEXT)
encode_text = msgspec.json.Encoder().encode
"""A text as a JSON string."""
# JSON leaves these as they are, and SSE does not split lines at them, but clients that use str.splitlines do.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """`text` as a JSON string that holds no character at which any client would split a line."""
    encoded: bytes = encode_text(text)
    return encoded if text.isascii() else one_line(encoded)


def one_line(encoded: bytes) -> bytes:
    """JSON with no character in its strings at which any client would split a line."""
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


@dataclass(slots=True, kw_only=True)
class Answer(ABC):
    """One answer's envelope; the subclasses say what is in its choices."""

    request_id: str
    model: str
    includes_usage: bool = False
    echo: Echo | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    _head: bytes = field(default=b"", init=False)
    _tail: bytes = field(default=b"", init=False)

    @property
    @abstractmethod
    def _names(self) -> tuple[str, str, str]:
        """The prefix of the id, `object` of a whole answer, `object` of an event."""

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """What comes before all else of a choice in a stream."""

    @abstractmethod
    def logprobs_writer(self, token_bytes: Sequence[bytes]) -> LogprobsWriter:
        """For the log probabilities of one choice. token_bytes: of each token id."""

    @abstractmethod
    def _piece(self, text: str | None) -> dict[str, Any]:
        """What an event's choice has besides index, logprobs and finish_reason. None: the last one, without text."""

    @abstractmethod
    def _whole(self, index: int, text: str) -> dict[str, Any]:
        """What a whole answer's choice has besides index, logprobs and finish_reason."""

    def body(self, choices: Mapping[int, Collected], usage: Usage, token_bytes: Sequence[bytes] = ()) -> bytes:
        """The whole answer. token_bytes: of each token id, where there are log probabilities."""
        prefix, name, _ = self._names
        written = [self._written(index, choice, token_bytes) for index, choice in choices.items()]
        return msgspec.json.encode(self._envelope(prefix, name, written) | {"usage": _usage(usage)})

    def _written(self, index: int, choice: Collected, token_bytes: Sequence[bytes]) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs:
            logprobs = self.logprobs_writer(token_bytes).write(choice.token_ids, choice.logprobs)
        return _choice(index, self._whole(index, choice.text), choice.finish_reason, logprobs)

    def partial(self, choices: Mapping[int, Collected]) -> dict[str, Any]:
        """What had come of an answer that failed."""
        written = [
            {"index": index, **self._whole(index, choice.text), "finish_reason": choice.finish_reason}
            for index, choice in choices.items()
        ]
        return {"choices": written}

    def frame(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of the text in each event of a choice."""
        head, _, tail = self._event(_choice(index, self._piece(_TEXT))).rpartition(_TEXT_ENCODED)
        return head, tail

    def piece(self, index: int, text: str, logprobs: dict[str, Any]) -> bytes:
        """An event with the log probabilities of its tokens."""
        return self._event(_choice(index, self._piece(text), logprobs=logprobs))

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """The last event of a choice."""
        return self._event(_choice(index, self._piece(None), reason))

    def ending(self, usage: Usage) -> bytes:
        """The last events of a stream."""
        return (self._enveloped([], _usage(usage)) if self.includes_usage else b"") + DONE

    def _event(self, choice: dict[str, Any]) -> bytes:
        """What tells of one choice. What stands around that is the same in all events of a stream."""
        if not self._head:
            self._head, _, self._tail = self._enveloped([]).rpartition(b"[]")
        return b"%b[%b]%b" % (self._head, one_line(msgspec.json.encode(choice)), self._tail)

    def _enveloped(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        prefix, _, name = self._names
        chunk = self._envelope(prefix, name, choices)
        if self.includes_usage:
            chunk["usage"] = usage
        return b"data: " + one_line(msgspec.json.encode(chunk)) + b"\n\n"

    def _envelope(self, prefix: str, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


class CompletionAnswer(Answer):
    """The answer to /v1/completions."""

    __slots__ = ()

    @property
    def _names(self) -> tuple[str, str, str]:
        return "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> bytes:
        if self.echo is None:
            return b""
        return self._event(_choice(index, self._piece(self.echo.text_of(index))))

    def logprobs_writer(self, token_bytes: Sequence[bytes]) -> LogprobsWriter:
        return CompletionLogprobs(token_bytes)

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _whole(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text if self.echo is None else self.echo.text_of(index) + text}


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    __slots__ = ()

    @property
    def _names(self) -> tuple[str, str, str]:
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self._event(_choice(index, {"delta": {"role": "assistant", "content": ""}}))

    def logprobs_writer(self, token_bytes: Sequence[bytes]) -> LogprobsWriter:
        return ChatLogprobs(token_bytes)

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _whole(self, index: int, text: str) -> dict[str, Any]:
        del index
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _choice(
    index: int,
    content: dict[str, Any],
    finish_reason: FinishReason | None = None,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def model_object(card: ModelCard, created: int) -> dict[str, Any]:
    """One model of /v1/models; `max_model_len` is vLLM's word for the context length."""
    return {
        "id": card.model,
        "object": "model",
        "created": created,
        "owned_by": "unbroken",
        "max_model_len": card.context_length,
    }


def model_list(cards: Sequence[ModelCard], created: int) -> bytes:
    """The body of /v1/models."""
    return msgspec.json.encode({"object": "list", "data": [model_object(card, created) for card in cards]})
