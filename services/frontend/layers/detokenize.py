"""Turns tokens into text: delivers complete characters only, ends the answer at a stop string, and counts its usage.

Stop strings are searched in the text with the special tokens spelled out, although the client's text leaves those out.
A string ends the answer if its last character comes from a token after the first `min_tokens`; it may begin before. A
character counts where its last byte comes, so a special token within it is spelled before it.
"""

import codecs
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from services.core.call import Call
from services.core.generation.kept import Kept
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import Continuation, FinishReason, Request
from services.frontend.layers.stop_strings import StopStrings
from services.frontend.model_catalog import ModelCatalog
from services.models.tokenizers import Vocabulary
from services.runtime.cancel_scope import CancelScope

_UtfDecoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """A sink that adds the text to the deltas of one answer.

    on_stopped: called once when a stop string ends the answer.
    """

    __slots__ = (
        "_continuation",
        "_decoder",
        "_is_whole",
        "_min_tokens",
        "_sink",
        "_special_tokens",
        "_stops",
        "_token_bytes",
        "is_stopped",
        "on_stopped",
        "token_count",
    )

    def __init__(self, sink: Sink, vocabulary: Vocabulary, strings: Sequence[str], min_tokens: int = 0) -> None:
        self._sink = sink
        self._token_bytes = vocabulary.token_bytes
        self._special_tokens = vocabulary.special_tokens
        self._min_tokens = min_tokens
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_whole = True  # The bytes decoded so far end with a complete character.
        self._stops = StopStrings(strings) if strings else None
        self._continuation: Continuation | None = None  # Told with the end.
        self.on_stopped: Callable[[], None] | None = None
        self.is_stopped = False
        self.token_count = 0

    def prime(self, token_ids: Sequence[int]) -> str:
        """Feed the tokens that the client already has. Returns the text that came with them.

        They may end within a character or within a stop string. If the last of them completes a stop string, the answer
        is complete.
        """
        self.token_count = len(token_ids)
        if self._stops is None:
            return self._decode(b"".join([self._token_bytes[token] for token in token_ids]))
        shown = []
        for count, token in enumerate(token_ids, start=1):
            may_stop = count == self.token_count and count > self._min_tokens
            text, self.is_stopped = self._search(self._stops, token, may_stop=may_stop)
            shown.append(text)
        return "".join(shown)

    def deliver(self, delta: Delta) -> None:
        if self._stops is not None:
            self._deliver_until_stop(self._stops, delta)
            return
        token_ids = delta.token_ids
        self.token_count += len(token_ids)
        if len(token_ids) == 1:
            delta.text = self._decode(self._token_bytes[token_ids[0]])
        elif token_ids:
            delta.text = self._decode(b"".join([self._token_bytes[token] for token in token_ids]))
        else:
            self._continuation = delta.continuation
            return
        self._sink.deliver(delta)

    def _decode(self, encoded: bytes) -> str:
        """The characters that are complete so far. Most text is ASCII, which needs no decoder."""
        if self._is_whole and encoded.isascii():
            return encoded.decode("ascii")
        if self._decoder is None:
            self._decoder = _UtfDecoder(errors="replace")
        text = self._decoder.decode(encoded)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def _deliver_until_stop(self, stops: StopStrings, delta: Delta) -> None:
        """Feed one token at a time, so that the answer ends with the same token however tokens were coalesced."""
        if not delta.token_ids:
            self._continuation = delta.continuation
        if self.is_stopped or not delta.token_ids:
            return
        shown = []
        for size, token in enumerate(delta.token_ids, start=1):
            may_stop = self.token_count + size > self._min_tokens
            text, self.is_stopped = self._search(stops, token, may_stop=may_stop)
            shown.append(text)
            if self.is_stopped:
                delta.token_ids = delta.token_ids[:size]
                delta.logprobs = delta.logprobs and delta.logprobs[:size]
                if self.on_stopped is not None:
                    self.on_stopped()
                break
        self.token_count += len(delta.token_ids)
        delta.text = "".join(shown)
        self._sink.deliver(delta)

    def _search(self, stops: StopStrings, token: int, *, may_stop: bool) -> tuple[str, bool]:
        """Search in what the token adds. Returns the text to deliver, and whether a stop string was completed."""
        content = self._token_bytes[token]
        if content:
            return stops.feed(self._decode(content), may_stop=may_stop)
        return stops.feed(self._special_tokens.get(token, ""), is_shown=False, may_stop=may_stop)

    def finish(self, request: Request, reason: FinishReason) -> Finish:
        """Deliver the text that was held back and the finish reason."""
        text = "" if self.is_stopped else self._flush()
        finish = Finish(
            FinishReason.STOP if self.is_stopped else reason,
            Usage(len(request.prompt_token_ids), self.token_count),
        )
        last = Delta(self.token_count, (), text, request.choice, finish_reason=finish.reason, usage=finish.usage)
        last.continuation = self._continuation
        self._sink.deliver(last)
        return finish

    def _flush(self) -> str:
        text = "" if self._decoder is None else self._decoder.decode(b"", final=True)
        if self._stops is not None:
            text, self.is_stopped = self._stops.feed(text, may_stop=self.token_count > self._min_tokens)
            text += self._stops.flush()
        return text


class _PromptCounted:
    """Adds the tokens of the prompt to the deltas of one answer."""

    __slots__ = ("_prompt_tokens", "_sink")

    def __init__(self, sink: Sink, prompt_tokens: int) -> None:
        self._sink = sink
        self._prompt_tokens = prompt_tokens

    def deliver(self, delta: Delta) -> None:
        delta.prompt_tokens = self._prompt_tokens
        self._sink.deliver(delta)


class Cut:
    """Passes the deltas of one answer on, and cuts the one that the client has a part of."""

    __slots__ = ("_position", "_sink")

    def __init__(self, sink: Sink, position: int) -> None:
        self._sink = sink
        self._position = position

    def deliver(self, delta: Delta) -> None:
        size = self._position - delta.position
        if 0 < size < len(delta.token_ids):
            logprobs = delta.logprobs
            first = Delta(delta.position, delta.token_ids[:size], choice=delta.choice)
            rest = Delta(self._position, delta.token_ids[size:], choice=delta.choice)
            if logprobs is not None:
                first.logprobs, rest.logprobs = logprobs[:size], logprobs[size:]
            self._sink.deliver(first)
            delta = rest
        self._sink.deliver(delta)


def _cut_at_cursor(sink: Sink, kept: Kept, index: int) -> Sink:
    """The sink, or one that cuts the deltas of a resumed answer at the client's cursor."""
    if kept.cursor is None or index >= len(kept.cursor.positions):
        return sink
    return Cut(sink, kept.cursor.positions[index])


class Detokenize:
    """Must be above migrate: a partial character or stop string is completed by tokens of the next worker."""

    def __init__(self, inner: Layer, catalog: ModelCatalog) -> None:
        self._inner = inner
        self._catalog = catalog

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        if call.counts_prompt:
            sink = _PromptCounted(sink, len(request.prompt_token_ids))
        vocabulary = self._catalog.find(request.model).tokenizer
        detokenizer = Detokenizer(sink, vocabulary, request.stop.strings, request.stop.min_tokens)
        detokenizer.prime(request.generated_token_ids)
        below: Sink = detokenizer
        if (kept := call.kept) is not None:
            below = _cut_at_cursor(detokenizer, kept, kept.index_of(request.choice))
        if not request.stop.strings:
            return detokenizer.finish(request, (await self._inner(request, call, below)).reason)
        if kept is not None:
            call = replace(call, kept=replace(kept, is_stopped=lambda: detokenizer.is_stopped))
        reason = FinishReason.STOP
        if detokenizer.is_stopped:
            return detokenizer.finish(request, reason)
        with CancelScope() as scope:
            detokenizer.on_stopped = scope.cancel  # A sink cannot raise into the request.
            reason = (await self._inner(_without_strings(request), call, below)).reason
        return detokenizer.finish(request, reason)


def _without_strings(request: Request) -> Request:
    """The request for the worker: stop strings are matched here."""
    return replace(request, stop=replace(request.stop, strings=()))
