"""What a stream sends for each delta: the events of each choice, formatted once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.frontend.http.answers import Answer, json_text
from services.frontend.http.logprobs import LogprobsWriter
from services.request import Delta


@dataclass(slots=True)
class _Begun:
    """A choice that has had its opening. head, tail: what stands around the JSON of a text."""

    head: bytes
    tail: bytes
    logprobs: LogprobsWriter | None = None


class Events:
    """The events of one stream, choice by choice."""

    def __init__(self, answer: Answer, token_bytes: Callable[[], Sequence[bytes]]) -> None:
        """token_bytes: of each token id; asked once there are log probabilities."""
        self._answer = answer
        self._token_bytes = token_bytes
        self._begun: dict[int, _Begun] = {}

    def of(self, delta: Delta) -> bytes:
        """Those that the delta makes, in order: empty if it has neither text, nor log probabilities, nor an end."""
        choice = self._begun.get(delta.choice)
        if choice is None or delta.logprobs or delta.finish_reason is not None:
            return self._rare(delta, choice)
        if not (text := delta.text):
            return b""
        return b"%b%b%b" % (choice.head, json_text(text), choice.tail)

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
        return events

    def _with_logprobs(self, delta: Delta, choice: _Begun) -> bytes:
        assert delta.logprobs
        if choice.logprobs is None:
            choice.logprobs = self._answer.logprobs_writer(self._token_bytes())
        logprobs = choice.logprobs.write(delta.token_ids, delta.logprobs)
        return self._answer.piece(delta.choice, delta.text, logprobs)
