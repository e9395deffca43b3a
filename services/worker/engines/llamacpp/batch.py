"""Continuous batching: each step brings every sequence on by a token, and one prompt by a piece.

The shape of every decode is fixed by rules that keep results exact; the package says why. Cost of a step: one decode of
one token for each stream up to the highest in use, and at most one of a piece of a prompt.
"""

from collections.abc import Iterable, Sequence

import structlog

from services.errors import Failure, Reason, invalid
from services.guided import Form
from services.request import FinishReason, Request, TokenLogprobs
from services.worker.engine import EngineLoad, Output, RankLoad
from services.worker.engines.llamacpp.draw import choose_from, enders
from services.worker.engines.llamacpp.model import Llama, Row

log = structlog.get_logger()

PIECE_TOKENS_MIN = 2
PIECE_TOKENS_MAX = 63
"""A piece of a prompt outside of these takes another kernel: see the package."""
KV_BLOCK_TOKENS = 32
_FILLER = 0
"""Any token would do: its result is thrown away."""


class Running:
    """One request on the model: the tokens it has, how many of them are in its cache, and the form it is held to."""

    def __init__(self, key: int, request: Request, end_ids: frozenset[int], form: Form | None = None) -> None:
        assert (form is None) == (request.guided is None)
        self.key = key
        self.request = request
        self.stream = -1
        self.computed_count = 0
        self.tokens = [*request.prompt_token_ids, *request.generated_token_ids]
        self._prompt_count = len(request.prompt_token_ids)
        self._end_ids = end_ids
        self._enders = enders(request, end_ids)
        self._form = form

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self._prompt_count :]

    @property
    def pending_count(self) -> int:
        """Tokens that must be computed before the next can be drawn."""
        return len(self.tokens) - self.computed_count

    def is_at_limit(self, context_length: int) -> bool:
        generated_count = len(self.tokens) - self._prompt_count
        return generated_count >= self.request.max_tokens or len(self.tokens) >= context_length

    def choices(self) -> bytes | None:
        """What its form lets it draw, one bit for each token; None: anything. Raises Failure."""
        if self._form is None:
            return None
        return choose_from(self._form.allowed(), self.request, len(self.generated), self._end_ids)

    def end_of_form(self) -> Output:
        """What to say when there is no choice left."""
        assert self._form is not None
        if self._form.is_complete:
            return Output(self.key, finish=FinishReason.STOP)
        return Output(self.key, failure=invalid("guided", "the model has no token that the form could go on with"))

    def take(self, token: int, context_length: int, logprobs: TokenLogprobs | None = None) -> Output:
        """Add what was drawn, or end with it."""
        may_end = len(self.tokens) - self._prompt_count >= self.request.stop.min_tokens
        if may_end and token in self._enders:
            return Output(self.key, finish=FinishReason.STOP)
        if self._form is not None:
            self._form.take(token)
        self.tokens.append(token)
        finish = FinishReason.LENGTH if self.is_at_limit(context_length) else None
        return Output(self.key, (token,), finish, logprobs=None if logprobs is None else (logprobs,))


class Batch:
    """All sequences that run. piece_tokens: how much of a prompt a step computes, from 2 to 63 tokens."""

    def __init__(self, llama: Llama, *, streams: int, piece_tokens: int) -> None:
        assert PIECE_TOKENS_MIN <= piece_tokens <= PIECE_TOKENS_MAX
        self._llama = llama
        self._piece_tokens = piece_tokens
        self._streams: list[Running | None] = [None] * streams
        self._running: dict[int, Running] = {}
        self._steps = 0
        self.load = self._measure()

    @property
    def is_empty(self) -> bool:
        return not self._running

    def add(self, running: Running) -> None:
        # The lowest stream, because a step computes a filler for each idle stream below the highest in use.
        running.stream = self._streams.index(None)
        self._streams[running.stream] = running
        self._running[running.key] = running
        self.load = self._measure()

    def remove(self, key: int) -> None:
        """Idempotent."""
        running = self._running.pop(key, None)
        if running is not None:
            self._streams[running.stream] = None
            self._llama.forget(running.stream)
            self.load = self._measure()

    def step(self) -> list[Output]:
        """Bring every sequence on. Raises what llama.cpp raises when it cannot go on."""
        at_limit = [one for one in self._running.values() if one.is_at_limit(self._llama.context_length)]
        outputs = [Output(one.key, finish=FinishReason.LENGTH) for one in at_limit]
        self._remove_ended(outputs)
        if self._running:
            self._compute_piece()
            drawn = self._advance()
            self._remove_ended(drawn)
            outputs += drawn
        return outputs

    def _remove_ended(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                self.remove(output.key)

    def _compute_piece(self) -> None:
        """Compute a piece of the oldest prompt that has one; never its last token, which belongs to `_advance`."""
        for running in self._running.values():
            size = min(running.pending_count - 1, self._piece_tokens)
            if size >= PIECE_TOKENS_MIN:
                start = running.computed_count
                tokens = running.tokens[start : start + size]
                self._decode([Row(running.stream, start + index, token) for index, token in enumerate(tokens)])
                running.computed_count += size
                return

    def _advance(self) -> list[Output]:
        """Compute one token of every sequence, and draw the next where there is none yet."""
        used = 1 + max(running.stream for running in self._running.values())
        streams = range(max(used, self._llama.streams_min))
        self._decode([self._row(stream) for stream in streams])
        outputs = []
        for stream in streams:
            running = self._at(stream)
            if running is None:
                self._llama.forget(stream)
                continue
            running.computed_count += 1
            if running.pending_count == 0:
                outputs.append(self._draw(running))
        return outputs

    def _at(self, stream: int) -> Running | None:
        return self._streams[stream] if stream < len(self._streams) else None

    def _row(self, stream: int) -> Row:
        running = self._at(stream)
        if running is None:
            return Row(stream, 0, _FILLER, is_scored=self._llama.pads)
        position = running.computed_count
        is_scored = self._llama.pads or running.pending_count == 1
        return Row(stream, position, running.tokens[position], is_scored)

    def _draw(self, running: Running) -> Output:
        try:
            return self._draw_next(running)
        except Failure as failure:
            return Output(running.key, failure=failure)
        except Exception:
            # One request's fault must not harm the others.
            log.exception("drawing a token failed", key=running.key)
            return Output(running.key, failure=Failure(Reason.ENGINE_ERROR, "llama.cpp could not draw a token"))

    def _draw_next(self, running: Running) -> Output:
        choices = running.choices()
        if choices is not None and not any(choices):
            return running.end_of_form()
        request, row = running.request, running.stream
        token = self._llama.draw(row, request, running.generated, choices)
        asked = request.logprobs
        logprobs = None if asked is None else self._llama.logprobs(row, token, asked)
        return running.take(token, self._llama.context_length, logprobs)

    def _decode(self, rows: Sequence[Row]) -> None:
        self._llama.decode(rows)
        self._steps += 1
        self.load = self._measure()

    def _measure(self) -> EngineLoad:
        # Made here and read as a whole by the event loop, which must not walk what this thread changes.
        used = sum(-(-len(one.tokens) // KV_BLOCK_TOKENS) for one in self._running.values())
        total = len(self._streams) * -(-self._llama.context_length // KV_BLOCK_TOKENS)
        prefill = sum(one.pending_count - 1 for one in self._running.values())
        return EngineLoad(self._steps, (RankLoad(used, total, max(prefill, 0)),))
