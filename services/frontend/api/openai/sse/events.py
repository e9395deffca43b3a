"""Formats the events of a stream as bytes for the socket.

Events are encoded from the types in schemas.py. Nearly all of them differ from the event before in the text alone, so
the bytes around the text are made once for each choice.
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.core.interface import Delta, Usage
from services.frontend.api.openai.logprobs import LogprobsWriter
from services.frontend.api.openai.responses import Answer
from services.models.tokenizers import Vocabulary

DONE = b"data: [DONE]\n\n"
COMMENT = b": keepalive\n"
_PLACEHOLDER = "\0"
_PLACEHOLDER_ENCODED = msgspec.json.encode(_PLACEHOLDER)
SIZES_PREPARED = 1024
CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(SIZES_PREPARED))
"""The first lines of chunks of these sizes: to look one up is cheaper than to format it for every token."""
join = b"".join
encode = msgspec.json.Encoder().encode
# JSON and SSE allow these line separators inside a string, but clients that use str.splitlines split at them.
_SEPARATORS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def json_text(text: str) -> bytes:
    """`text` as a JSON string without characters at which a client might split a line."""
    encoded: bytes = encode(text)
    return encoded if text.isascii() else one_line(encoded)


def one_line(encoded: bytes) -> bytes:
    """The same JSON without characters at which a client might split a line."""
    for raw, escaped in _SEPARATORS:
        encoded = encoded.replace(raw, escaped)
    return encoded


class OpenChoice(Struct):
    """A choice whose first event has been formatted. `head`, `tail`: the bytes around the text of each event."""

    head: bytes
    tail: bytes
    logprobs: LogprobsWriter | None = None
    size: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.head) + len(self.tail)


class Events:
    """The events of one stream. `has_ids`: whether they have `id:` lines."""

    has_ids = False
    __slots__ = ("_answer", "_head", "_is_chunked", "_open", "_tail", "_vocabulary")

    def __init__(self, answer: Answer, vocabulary: Callable[[], Vocabulary], *, is_chunked: bool) -> None:
        """`vocabulary`: returns the model's vocabulary; called once there are log probabilities. `is_chunked`: each
        result of `of` is a chunk of an HTTP/1.1 body. HTTP/1.0 has no chunks and ends the body by closing.
        """
        self._answer = answer
        self._vocabulary = vocabulary
        self._is_chunked = is_chunked
        self._open: dict[int, OpenChoice] = {}
        self._head = self._tail = b""

    def of(self, delta: Delta) -> bytes:
        """The events of a delta, in order; empty if it has nothing to say."""
        choice = self._open.get(delta.choice)
        if choice is None or delta.logprobs or delta.finish_reason is not None:
            return self._uncommon(delta, choice)
        if not delta.text:
            return b""
        text = encode(delta.text)  # Every token takes this path: no further calls, no copies.
        if not text.isascii():
            text = one_line(text)
        if self._is_chunked:
            size = choice.size + len(text)
            chunk_head = CHUNK_HEADS[size] if size < SIZES_PREPARED else b"%x\r\n" % size
            return join((chunk_head, choice.head, text, choice.tail, b"\r\n"))
        return choice.head + text + choice.tail

    def ending(self, usage: Usage) -> bytes:
        """The last events of the stream: usage, if the client asked for it, and the end marker."""
        return self._usage_event(usage) + DONE

    def _usage_event(self, usage: Usage) -> bytes:
        return self._event([], usage) if self._answer.includes_usage else b""

    def failed(self, error: bytes, *, is_final: bool) -> bytes:
        """The last event of a stream that fails. `error`: in JSON. `is_final`: coming back is of no use."""
        del is_final
        return b"event: error\ndata: %b\n\n" % error

    def comment(self) -> bytes:
        """A comment between events, which clients ignore.

        The empty line after it is for clients that split the stream at empty lines and skip what begins with a colon.
        It is left out among events with ids: OpenAI's SDK for Python, which has remembered an id, takes it for the end
        of an event without data.
        """
        comment = COMMENT if self.has_ids else COMMENT + b"\n"
        return b"%x\r\n%b\r\n" % (len(comment), comment) if self._is_chunked else comment

    def _uncommon(self, delta: Delta, choice: OpenChoice | None) -> bytes:
        """The events of the first delta of a choice, of one with log probabilities, or of the last one."""
        if not (self._has_piece(delta) or delta.logprobs or delta.finish_reason is not None):
            return b""
        events = b""
        if choice is None:
            choice = self._open[delta.choice] = self._start(delta.choice)
            events = self._opening(delta.choice)
        if delta.logprobs or choice.logprobs is not None:
            events += self._with_logprobs(delta, choice)
        elif self._has_piece(delta):
            events += self._with_text(delta, choice)
        if delta.finish_reason is not None:
            finish = self._answer.finish(delta.choice, delta.finish_reason, delta.continuation)
            events += self._event_of(finish)
        if not events:
            return b""  # An empty chunk would end the body.
        return b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events

    def _start(self, index: int) -> OpenChoice:
        if not self._head:
            self._head, _, self._tail = self._event([]).rpartition(b"[]")
        head, _, tail = self._event_of(self._answer.piece(index, _PLACEHOLDER)).rpartition(_PLACEHOLDER_ENCODED)
        return OpenChoice(head, tail)

    def _has_piece(self, delta: Delta) -> bool:
        """Whether the delta has something to say besides log probabilities and an end."""
        return bool(delta.text)

    def _opening(self, index: int) -> bytes:
        opening = self._answer.opening(index)
        return b"" if opening is None else self._event_of(opening)

    def _with_text(self, delta: Delta, choice: OpenChoice) -> bytes:
        return choice.head + json_text(delta.text) + choice.tail

    def _with_logprobs(self, delta: Delta, choice: OpenChoice) -> bytes:
        """The event of the delta's text and of its log probabilities."""
        logprobs = self._logprobs(delta, choice)
        if not self._has_piece(delta) and logprobs is None:
            return b""
        return self._piece(delta, logprobs)

    def _logprobs(self, delta: Delta, choice: OpenChoice, *, is_skipped: bool = False) -> Any:
        """The log probabilities whose place in the text is known; None: there are none, or the client has them."""
        if choice.logprobs is None:
            if not delta.logprobs:
                return None
            choice.logprobs = self._answer.logprobs_writer(delta.choice, self._vocabulary())
        is_last = delta.finish_reason is not None
        token_ids, given = (delta.token_ids, delta.logprobs) if delta.logprobs else ((), ())
        writer = choice.logprobs
        return (writer.skip if is_skipped else writer.write)(token_ids, given, delta.text, is_last=is_last)

    def _piece(self, delta: Delta, logprobs: Any) -> bytes:
        return self._event_of(self._answer.piece(delta.choice, delta.text, logprobs))

    def _event_of(self, choice: Any) -> bytes:
        """An event about one choice. The bytes around the choice are the same in every event of the stream."""
        return b"%b[%b]%b" % (self._head, one_line(encode(choice)), self._tail)

    def _event(self, choices: list[Struct], usage: Usage | None = None, prompt: list[int] | UnsetType = UNSET) -> bytes:
        return b"data: " + one_line(encode(self._answer.chunk(choices, usage, prompt))) + b"\n\n"


class DetailedEvents(Events):
    """The events of a stream of which each has more than text, as vLLM has it: the usage of its choice so far
    (`continuous_usage_stats`), its token ids (`return_token_ids`), or both.

    With token ids, every delta with tokens has an event, also one whose text is held back. The first event of a choice
    has the token ids of its prompt.
    """

    __slots__ = ("_begun", "_has_token_ids", "_has_usage", "_so_far")

    def __init__(self, answer: Answer, vocabulary: Callable[[], Vocabulary], *, is_chunked: bool) -> None:
        super().__init__(answer, vocabulary, is_chunked=is_chunked)
        self._has_usage, self._has_token_ids = answer.has_usage_in_events, answer.returns_token_ids
        self._begun: set[int] = set()
        self._so_far = Usage(0, 0)

    def of(self, delta: Delta) -> bytes:
        self._so_far = Usage(delta.prompt_tokens, delta.position + len(delta.token_ids))
        return self._uncommon(delta, self._open.get(delta.choice))

    def _has_piece(self, delta: Delta) -> bool:
        return bool(delta.text or (self._has_token_ids and delta.token_ids))

    def _start(self, index: int) -> OpenChoice:
        return OpenChoice(b"", b"")  # No two events have the same bytes around their text.

    def _opening(self, index: int) -> bytes:
        so_far = self._so_far
        self._so_far = Usage(so_far.prompt_tokens, self._answer.brought_count(index))
        opening = super()._opening(index)
        self._so_far = so_far
        return opening

    def _with_text(self, delta: Delta, choice: OpenChoice) -> bytes:
        return self._piece(delta, None)

    def _piece(self, delta: Delta, logprobs: Any) -> bytes:
        piece: Any = self._answer.piece(delta.choice, delta.text, logprobs)
        if self._has_token_ids:
            piece.token_ids = list(delta.token_ids)
        return self._event_of(piece)

    def _event_of(self, choice: Any) -> bytes:
        usage = self._so_far if self._has_usage else None
        prompt: list[int] | UnsetType = UNSET
        if self._has_token_ids:
            choice.token_ids = choice.token_ids or []
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                prompt = self._answer.prompt_of(choice.index)
        return self._event([choice], usage, prompt)


def events_of(answer: Answer, vocabulary: Callable[[], Vocabulary], *, is_chunked: bool) -> Events:
    """The events of a stream, as its client wants them. For the arguments see `Events`."""
    kind = DetailedEvents if answer.has_usage_in_events or answer.returns_token_ids else Events
    return kind(answer, vocabulary, is_chunked=is_chunked)
