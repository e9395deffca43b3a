"""The bodies of answers, as OpenAI has them: whole, or as the events of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.card import ModelCard
from services.request import Finish, Usage

DONE = b"data: [DONE]\n\n"
_TEXT = "\0"
_TEXT_ENCODED = msgspec.json.encode(_TEXT)
_encode_text = msgspec.json.Encoder().encode
# JSON leaves these as they are, and SSE does not split lines at them, but clients that use str.splitlines do.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """`text` as a JSON string that holds no character at which any client would split a line."""
    encoded: bytes = _encode_text(text)
    if not text.isascii():
        for raw, escaped in _LINE_ENDS:
            encoded = encoded.replace(raw, escaped)
    return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(ABC):
    """One answer's envelope; the subclasses say what is in its only choice."""

    request_id: str
    model: str
    includes_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    @abstractmethod
    def _names(self) -> tuple[str, str, str]:
        """The prefix of the id, `object` of a whole answer, `object` of an event."""

    @property
    @abstractmethod
    def opening(self) -> bytes:
        """What comes before the first text of a stream."""

    @abstractmethod
    def _piece(self, text: str | None) -> dict[str, Any]:
        """What an event's choice has besides index, logprobs and finish_reason. None: the last one, without text."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """What a whole answer's choice has besides index, logprobs and finish_reason."""

    def body(self, text: str, finish: Finish) -> bytes:
        """The whole answer."""
        prefix, name, _ = self._names
        choices = [_choice(self._whole(text), finish.reason)]
        return msgspec.json.encode(self._envelope(prefix, name, choices) | {"usage": _usage(finish)})

    def frame(self) -> tuple[bytes, bytes]:
        """What stands before and after the JSON of the text in each event of this stream."""
        head, _, tail = self._event([_choice(self._piece(_TEXT), None)]).rpartition(_TEXT_ENCODED)
        return head, tail

    def ending(self, finish: Finish) -> bytes:
        """The last events of a stream."""
        events = self._event([_choice(self._piece(None), finish.reason)])
        if self.includes_usage:
            events += self._event([], usage=_usage(finish))
        return events + DONE

    def _event(self, choices: list[dict[str, Any]], *, usage: dict[str, int] | None = None) -> bytes:
        prefix, _, name = self._names
        chunk = self._envelope(prefix, name, choices)
        if self.includes_usage:
            chunk["usage"] = usage
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

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

    @property
    def opening(self) -> bytes:
        return b""

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatAnswer(Answer):
    """The answer to /v1/chat/completions."""

    __slots__ = ()

    @property
    def _names(self) -> tuple[str, str, str]:
        return "chatcmpl", "chat.completion", "chat.completion.chunk"

    @property
    def opening(self) -> bytes:
        return self._event([_choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def _piece(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}


def _choice(content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(finish: Finish) -> dict[str, int]:
    usage = finish.usage
    assert isinstance(usage, Usage), "present sets usage"
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
