"""Turns tokens into text: whole characters, nothing of a stop string, and the usage of the whole answer."""

import codecs
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from services.core.call import Call
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import FinishReason, Request
from services.frontend.layers.stop_strings import StopStrings
from services.frontend.model_catalog import ModelCatalog
from services.runtime.cancel_scope import CancelScope

_UtfDecoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer so far.

    on_stopped: called once when a stop string ends it.
    """

    __slots__ = ("_decoder", "_is_whole", "_sink", "_stops", "_token_bytes", "is_stopped", "on_stopped", "token_count")

    def __init__(self, sink: Sink, token_bytes: Sequence[bytes], strings: Sequence[str]) -> None:
        self._sink = sink
        self._token_bytes = token_bytes
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_whole = True  # No half a character stands at the end of what was decoded.
        self._stops = StopStrings(strings) if strings else None
        self.on_stopped: Callable[[], None] | None = None
        self.is_stopped = False
        self.token_count = 0

    def prime(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the client has already: half a character, or half a stop string, may stand at their end."""
        for token in token_ids:
            text = self._decode(self._token_bytes[token])
            if self._stops is not None:
                self._stops.feed(text)
        self.token_count = len(token_ids)

    def deliver(self, delta: Delta) -> None:
        if self._stops is not None:
            self._deliver_until_stop(self._stops, delta)
            return
        token_ids = delta.token_ids
        self.token_count += len(token_ids)
        if len(token_ids) == 1:
            delta.text = self._decode(self._token_bytes[token_ids[0]])
        else:
            delta.text = self._decode(b"".join([self._token_bytes[token] for token in token_ids]))
        self._sink.deliver(delta)

    def _decode(self, encoded: bytes) -> str:
        """What is complete so far. The most of it is ASCII, which takes no decoder."""
        if self._is_whole and encoded.isascii():
            return encoded.decode("ascii")
        if self._decoder is None:
            self._decoder = _UtfDecoder(errors="replace")
        text = self._decoder.decode(encoded)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def _deliver_until_stop(self, stops: StopStrings, delta: Delta) -> None:
        """Token by token, so that the answer ends with the same token however the tokens were joined."""
        if self.is_stopped:
            return
        shown = []
        for size, token in enumerate(delta.token_ids, start=1):
            text, self.is_stopped = stops.feed(self._decode(self._token_bytes[token]))
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

    def finish(self, request: Request, reason: FinishReason) -> Finish:
        """Deliver what was held back, for nothing more comes to complete it, and why the answer ended."""
        text = "" if self.is_stopped else self._flush()
        finish = Finish(
            FinishReason.STOP if self.is_stopped else reason,
            Usage(len(request.prompt_token_ids), self.token_count),
        )
        last = Delta(self.token_count, (), text, request.choice, finish_reason=finish.reason, usage=finish.usage)
        self._sink.deliver(last)
        return finish

    def _flush(self) -> str:
        text = "" if self._decoder is None else self._decoder.decode(b"", final=True)
        if self._stops is not None:
            text, self.is_stopped = self._stops.feed(text)
            text += self._stops.flush()
        return text


class Detokenize:
    """Above migrate: half a character, and half a stop string, outlive the worker that sent them."""

    def __init__(self, inner: Layer, catalog: ModelCatalog) -> None:
        self._inner = inner
        self._catalog = catalog

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        token_bytes = self._catalog.find(request.model).tokenizer.token_bytes
        presenter = Detokenizer(sink, token_bytes, request.stop.strings)
        presenter.prime(request.generated_token_ids)
        if not request.stop.strings:
            return presenter.finish(request, (await self._inner(request, call, presenter)).reason)
        reason = FinishReason.STOP
        with CancelScope() as scope:
            presenter.on_stopped = scope.cancel  # A sink can't raise into the request.
            reason = (await self._inner(_without_strings(request), call, presenter)).reason
        return presenter.finish(request, reason)


def _without_strings(request: Request) -> Request:
    """Stop strings are found here: no worker has to look for them."""
    return replace(request, stop=replace(request.stop, strings=()))
