"""The events of an answer that can be resumed: each delta is one event, with the client's cursor as its id."""

from binascii import hexlify
from collections.abc import Callable, Sequence
from functools import partial
from zlib import crc32

from msgspec import UNSET, UnsetType

from services.core.call import Cause, Ending
from services.core.errors import Failure
from services.core.generation.cursor import DONE_ID, Cursor, CursorWriter, encoded_ids
from services.core.generation.kept import Kept
from services.core.generation.resumption import Resumption, bases_of
from services.core.interface import Delta, Usage
from services.core.request import Request
from services.frontend.api.openai.responses import Answer
from services.frontend.api.openai.sse.events import (
    CHUNK_HEADS,
    DONE,
    SIZES_PREPARED,
    Events,
    OpenChoice,
    encode,
    join,
    json_text,
    one_line,
)
from services.models.tokenizers import Vocabulary

RETRY_MS = 1000
"""How long a browser's EventSource waits before it comes back."""
_DONE = b"id: %b\n" % DONE_ID.encode()
NUMBERS_PREPARED = 4096
_NUMBERS = tuple(b"id: %d-" % position for position in range(NUMBERS_PREPARED))
_CHECKSUM_DIGITS = 8


class KeptEvents(Events):
    """Events with ids, and with what `DetailedEvents` have if the client asked for it.

    A client that has an event has all of its delta, so that an id says exactly what the client has: the beginning of
    a choice, text that was held back and the finish reason are parts of the event with the text. The id of the last
    event says that there is nothing to come back for: an EventSource comes back after every end of a response.
    """

    has_ids = True
    __slots__ = ("_after", "_before", "_checksums", "_cursor", "_has_begun", "_is_detailed", "_is_single", "_size")

    def __init__(self, answer: Answer, vocabulary: Callable[[], Vocabulary], count: int, *, is_chunked: bool) -> None:
        """`count`: choices of the answer."""
        super().__init__(answer, vocabulary, is_chunked=is_chunked)
        self._count_in(CursorWriter(count))
        self._has_begun = False
        self._is_single = count == 1
        # The bytes between the id and the text of an event, and those after the text. Empty until the only choice has
        # begun, and if there are more choices, or if events differ in more than id and text.
        self._before = self._after = b""
        self._size = 0  # The size of a chunk, without its number and its text.
        self._is_detailed = answer.has_usage_in_events or answer.returns_token_ids

    def of(self, delta: Delta) -> bytes:
        if not self._before or delta.logprobs or delta.finish_reason is not None:
            return self._sent(delta, self._formatted(delta))
        text, token_ids, checksums = delta.text, delta.token_ids, self._checksums
        count = len(token_ids)  # Nearly every token takes this path: no further calls, no copies.
        encoded = token_ids[0].to_bytes(4, "little") if count == 1 else encoded_ids(token_ids)
        checksums[0] = checksum = crc32(encoded, checksums[0])
        if not text:
            return b""
        shown = encode(text)
        if not shown.isascii():
            shown = one_line(shown)
        position, digits = delta.position + count, hexlify(checksum.to_bytes(4, "big"))
        number = _NUMBERS[position] if position < NUMBERS_PREPARED else b"id: %d-" % position
        if not self._is_chunked:
            return join((number, digits, self._before, shown, self._after))
        size = self._size + len(number) + len(shown)
        chunk_head = CHUNK_HEADS[size] if size < SIZES_PREPARED else b"%x\r\n" % size
        return join((chunk_head, number, digits, self._before, shown, self._after))

    def ending(self, usage: Usage) -> bytes:
        return b"%b%b%b" % (self._usage_event(usage), _DONE, DONE)

    def failed(self, error: bytes, *, is_final: bool) -> bytes:
        event = super().failed(error, is_final=is_final)
        return _DONE + event if is_final else event

    def _formatted(self, delta: Delta) -> bytes:
        """The event of a delta, without an id; empty if it has nothing to say."""
        choice = self._open.get(delta.choice)
        is_end = delta.finish_reason is not None
        if self._is_detailed or choice is None or delta.logprobs or is_end or choice.logprobs is not None:
            return self._joined(delta, choice)
        return b"%b%b%b" % (choice.head, json_text(delta.text), choice.tail) if delta.text else b""

    def _sent(self, delta: Delta, event: bytes) -> bytes:
        """The event of a delta as it is sent, with its id. Events are sent in the order of these calls."""
        self._cursor.add(delta.choice, delta.position, delta.token_ids, is_end=delta.finish_reason is not None)
        if not event:
            return b""  # An empty chunk would end the body.
        retry = b"" if self._has_begun else b"retry: %d\n" % RETRY_MS
        self._has_begun = True
        if self._is_single and not self._before and not self._is_detailed and not delta.logprobs:
            self._prepare(self._open[delta.choice])
        event = b"%bid: %b\n%b" % (retry, self._cursor.text.encode(), event)
        return b"%x\r\n%b\r\n" % (len(event), event) if self._is_chunked else event

    def _prepare(self, choice: OpenChoice) -> None:
        self._before, self._after = b"\n" + choice.head, choice.tail
        self._size = _CHECKSUM_DIGITS + len(self._before) + len(self._after)
        if self._is_chunked:
            self._after += b"\r\n"

    def _count_in(self, cursor: CursorWriter) -> None:
        """Write the ids from this cursor."""
        self._cursor, self._checksums = cursor, cursor.checksums

    def _joined(self, delta: Delta, choice: OpenChoice | None) -> bytes:
        answer, is_end = self._answer, delta.finish_reason is not None
        has_piece = self._has_piece(delta)
        if not (has_piece or delta.logprobs or is_end):
            return b""
        is_first = choice is None
        if choice is None:
            choice = self._open[delta.choice] = self._start(delta.choice)
        logprobs = self._logprobs(delta, choice)
        if not (has_piece or logprobs is not None or is_end or is_first):
            return b""
        joined = answer.joined(delta, logprobs, is_first=is_first)
        usage: Usage | None = None
        prompt: list[int] | UnsetType = UNSET
        if answer.returns_token_ids:
            joined.token_ids = list(delta.token_ids)
            prompt = answer.prompt_of(delta.choice) if is_first else UNSET
        if answer.has_usage_in_events:
            usage = Usage(delta.prompt_tokens, delta.position + len(delta.token_ids))
        return self._event([joined], usage, prompt)

    def _has_piece(self, delta: Delta) -> bool:
        return bool(delta.text or delta.continuation or (self._answer.returns_token_ids and delta.token_ids))

    def _skip(self, delta: Delta) -> None:
        """Note a delta whose event the client has: later ones depend on it."""
        choice = self._open.get(delta.choice)
        if choice is None:
            if not (self._has_piece(delta) or delta.logprobs or delta.finish_reason is not None):
                return  # Without an event of its own it does not begin the choice.
            choice = self._open[delta.choice] = self._start(delta.choice)
        self._logprobs(delta, choice, is_skipped=True)


class ResumedEvents(KeptEvents):
    """The events that a client does not have yet. `of` returns nothing until the client's cursor has been checked."""

    __slots__ = ("_is_past", "_on_failed", "_resumption")

    def __init__(
        self,
        answer: Answer,
        vocabulary: Callable[[], Vocabulary],
        bases: Sequence[int],
        *,
        is_chunked: bool,
        cursor: Cursor,
        on_failed: Callable[[Failure], None],
    ) -> None:
        """`bases`: see `bases_of`. `on_failed`: the cursor does not fit."""
        super().__init__(answer, vocabulary, len(bases), is_chunked=is_chunked)
        self._resumption = Resumption(cursor, bases)
        self._count_in(self._resumption.known)
        self._is_past = False
        self._on_failed = on_failed

    def of(self, delta: Delta) -> bytes:
        if self._is_past:
            return KeptEvents.of(self, delta)
        try:
            new = self._resumption.take(delta)
        except Failure as failure:
            self._on_failed(failure)
            return b""
        if self._resumption.has(delta):
            self._skip(delta)
        self._is_past = self._resumption.is_past
        return b"".join([self._sent(one, self._formatted(one)) for one in new])


def kept_events(
    answer: Answer,
    vocabulary: Callable[[], Vocabulary],
    bases: Sequence[int],
    cursor: Cursor | None,
    *,
    is_chunked: bool,
    on_failed: Callable[[Failure], None],
) -> KeptEvents:
    """The events of an answer that can be resumed, or is: then without those that the client has. See ResumedEvents."""
    if cursor is None:
        return KeptEvents(answer, vocabulary, len(bases), is_chunked=is_chunked)
    return ResumedEvents(answer, vocabulary, bases, is_chunked=is_chunked, cursor=cursor, on_failed=on_failed)


def events_for(
    answer: Answer,
    vocabulary: Callable[[], Vocabulary],
    request: Request,
    kept: Kept,
    ending: Ending,
    *,
    is_chunked: bool,
) -> KeptEvents:
    """The events of the answer to a request that is kept. A cursor that does not fit ends it."""
    on_failed = partial(ending.fail, cause=Cause.RESUME_REFUSED)
    return kept_events(answer, vocabulary, bases_of(request), kept.cursor, is_chunked=is_chunked, on_failed=on_failed)
