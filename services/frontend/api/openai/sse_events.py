"""What a stream sends for each delta: the events of each choice, formatted once, as bytes for the socket."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from services.core.interface import Delta
from services.frontend.api.openai.logprobs import LogprobsWriter
from services.frontend.api.openai.responses import Answer, encode_text, json_text, one_line


class _Begun(Struct):
    """A choice that has had its opening. head, tail: what stands around the JSON of a text."""

    head: bytes
    tail: bytes
    logprobs: LogprobsWriter | None = None
    size: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.head) + len(self.tail)


class Events:
    """The events of one stream, choice by choice."""

    __slots__ = ("_answer", "_begun", "_is_chunked", "_token_bytes")

    def __init__(self, answer: Answer, token_bytes: Callable[[], Sequence[bytes]], *, is_chunked: bool) -> None:
        """token_bytes: of each token id; asked once there are log probabilities. is_chunked: what is written together
        is a chunk of the HTTP/1.1 body; HTTP/1.0 ends its body by closing and has no chunks.
        """
        self._answer = answer
        self._token_bytes = token_bytes
        self._is_chunked = is_chunked
        self._begun: dict[int, _Begun] = {}

    def of(self, delta: Delta) -> bytes:
        """Those that the delta makes, in order: empty if it has neither text, nor log probabilities, nor an end."""
        choice = self._begun.get(delta.choice)
        if choice is None or delta.logprobs or delta.finish_reason is not None:
            return self._rare(delta, choice)
        if not delta.text:
            return b""
        text = encode_text(delta.text)  # From here on without calls and copies: this is what every token costs.
        if not text.isascii():
            text = one_line(text)
        if self._is_chunked:
            return b"%x\r\n%b%b%b\r\n" % (choice.size + len(text), choice.head, text, choice.tail)
        return choice.head + text + choice.tail

    def _rare(self, delta: Delta, choice: _Begun | None) -> bytes:
        """All but plain text in the midst of a choice."""
        if not (delta.text or delta.logprobs or delta.finish_reason is not None):
            return b""
        events = b""
        if choice is None:
            choice = self._begun[delta.choice] = _Begun(*self._answer.frame(delta.choice))
            events = self._answer.opening(delta.choice)
        if delta.logprobs:
            events += self._with_logprobs(delta, choice)
        elif delta.text:
            events += choice.head + json_text(delta.text) + choice.tail
        if delta.finish_reason is not None:
            events += self._answer.finish(delta.choice, delta.finish_reason)
        return b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events

    def _with_logprobs(self, delta: Delta, choice: _Begun) -> bytes:
        assert delta.logprobs
        if choice.logprobs is None:
            choice.logprobs = self._answer.logprobs_writer(self._token_bytes())
        logprobs = choice.logprobs.write(delta.token_ids, delta.logprobs)
        return self._answer.piece(delta.choice, delta.text, logprobs)
