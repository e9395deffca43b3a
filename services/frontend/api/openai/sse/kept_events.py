"""The events of an answer that can be resumed: each delta is one event, with the client's cursor as its id."""

from collections.abc import Callable, Sequence

from msgspec import UNSET, UnsetType

from services.core.errors import Failure, Reason
from services.core.generation.cursor import Cursor, CursorWriter
from services.core.interface import Delta, Usage
from services.core.request import Request
from services.frontend.api.openai.responses import Answer
from services.frontend.api.openai.sse.events import Events, OpenChoice, json_text
from services.models.tokenizers import Vocabulary

RETRY_MS = 1000
"""How long a browser's EventSource waits before it comes back."""


class KeptEvents(Events):
    """Events with ids, and with what `DetailedEvents` have if the client asked for it.

    A client that has an event has all of its delta, so that an id says exactly what the client has: the beginning of
    a choice, text that was held back and the finish reason are parts of the event with the text.
    """

    has_ids = True
    __slots__ = ("_cursor", "_has_begun", "_is_detailed")

    def __init__(self, answer: Answer, vocabulary: Callable[[], Vocabulary], count: int, *, is_chunked: bool) -> None:
        """`count`: choices of the answer."""
        super().__init__(answer, vocabulary, is_chunked=is_chunked)
        self._cursor = CursorWriter(count)
        self._has_begun = False
        self._is_detailed = answer.has_usage_in_events or answer.returns_token_ids

    def of(self, delta: Delta) -> bytes:
        is_end = delta.finish_reason is not None
        self._cursor.add(delta.choice, delta.position, delta.token_ids, is_end=is_end)
        choice = self._open.get(delta.choice)
        if self._is_detailed or choice is None or delta.logprobs or is_end or choice.logprobs is not None:
            event = self._joined(delta, choice)
        elif delta.text:
            event = b"%b%b%b" % (choice.head, json_text(delta.text), choice.tail)
        else:
            event = b""
        if not event:
            return b""  # An empty chunk would end the body.
        event = self._with_id(event)
        return b"%x\r\n%b\r\n" % (len(event), event) if self._is_chunked else event

    def _with_id(self, event: bytes) -> bytes:
        retry = b"" if self._has_begun else b"retry: %d\n" % RETRY_MS
        self._has_begun = True
        return b"%bid: %b\n%b" % (retry, self._cursor.text.encode(), event)

    def _joined(self, delta: Delta, choice: OpenChoice | None) -> bytes:
        answer, is_end = self._answer, delta.finish_reason is not None
        has_piece = bool(delta.text or delta.continuation or (answer.returns_token_ids and delta.token_ids))
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


class ResumedEvents(KeptEvents):
    """The events that a client does not have yet. `of` returns nothing until the client's cursor has been checked.

    All events are formatted, from the first one on, since text and log probabilities depend on those before.
    """

    __slots__ = ("_bases", "_client", "_has_failed", "_is_checked", "_known", "_on_failed", "_waiting")

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
        """`bases`: the tokens of each choice that the client itself had sent. `on_failed`: the cursor does not fit."""
        super().__init__(answer, vocabulary, len(bases), is_chunked=is_chunked)
        self._bases = bases
        self._client = cursor
        self._known = CursorWriter(len(bases))
        self._on_failed = on_failed
        self._waiting: list[bytes] = []
        self._is_checked = self._has_failed = False

    def of(self, delta: Delta) -> bytes:
        events = super().of(delta)
        if self._has_failed:
            return b""
        if self._is_checked:
            return b"" if self._has(delta) else events
        if len(self._client.positions) != len(self._bases):
            self._fail(Reason.RESUME_DIVERGED, "the cursor is that of an answer with another number of choices")
            return b""
        if self._has(delta):
            self._known.add(delta.choice, delta.position, delta.token_ids, is_end=False)
        elif self._refutes(delta):
            return b""
        else:
            self._waiting.append(events)
        if not self._is_complete:
            return b""
        self._is_checked = True
        if self._known.checksum != self._client.checksum:
            self._fail(Reason.RESUME_DIVERGED, "the tokens before the cursor are not those that this answer has")
            return b""
        waiting, self._waiting = self._waiting, []
        return b"".join(waiting)

    def _has(self, delta: Delta) -> bool:
        """Whether the client has the delta. The deltas of a resumed answer are cut at its cursor."""
        if delta.finish_reason is not None:
            return self._client.ended[delta.choice]
        return delta.position + len(delta.token_ids) <= self._client.positions[delta.choice]

    def _refutes(self, delta: Delta) -> bool:
        """Whether a delta that the client does not have shows that its cursor does not fit."""
        choice = delta.choice
        if self._client.ended[choice]:
            self._fail(Reason.RESUME_DIVERGED, "the answer goes on after the end that the cursor says")
        elif delta.finish_reason is not None and delta.position < self._client.positions[choice]:
            detail = f"the answer has {delta.position} tokens, and the cursor is at {self._client.positions[choice]}"
            self._fail(Reason.CURSOR_BEYOND_END, detail)
        else:
            return False
        return True

    @property
    def _is_complete(self) -> bool:
        """Whether everything before the cursor has come."""
        client, known = self._client, self._known
        return all(
            position <= base or known.position(choice) == position
            for choice, (position, base) in enumerate(zip(client.positions, self._bases, strict=True))
        )

    def _fail(self, reason: Reason, detail: str) -> None:
        self._has_failed = True
        self._waiting = []
        self._on_failed(Failure(reason, detail))


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


def bases_of(request: Request) -> Sequence[int]:
    """How many tokens of each choice the client itself has sent."""
    return [len(part.generated_of(choice)) for part in request.parts or (request,) for choice in range(request.n)]
