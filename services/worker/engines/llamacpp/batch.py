"""Continuous batching: each step brings every sequence on by a token, and one prompt by a piece.

The shape of every decode is fixed by rules that keep results exact; the package says why. Cost of a step: one decode of
one token for each stream up to the highest in use, and at most one of a piece of a prompt.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import structlog

from services.core.errors import Failure, Reason, invalid
from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Request
from services.worker.engine import EngineLoad, Output
from services.worker.engines.llamacpp.grammar import Form
from services.worker.engines.llamacpp.model import Llama, Row
from services.worker.engines.llamacpp.sampler import choose_from, enders

log = structlog.get_logger()

PIECE_TOKENS_MIN = 2
PIECE_TOKENS_MAX = 63
"""A piece of a prompt outside of these takes another kernel: see the package."""
KV_BLOCK_TOKENS = 32
_FILLER = 0
"""Any token would do: its result is thrown away."""


class Running:
    """One request on the model: the tokens it has, how many of them are in its cache, and the form it is held to.

    The engine's thread changes it once it is in a batch. Others may read `block_count` and `prefill_left` meanwhile:
    each is made of one number and is true of the moment when it is read.
    """

    def __init__(self, key: int, request: Request, end_ids: frozenset[int], form: Form | None = None) -> None:
        self.key = key
        self.request = request
        self.form = form
        self.stream = -1
        self.computed_count = 0
        self.tokens = [*request.prompt_token_ids, *request.generated_token_ids]
        self._prompt_count = len(request.prompt_token_ids)
        self._given_count = len(self.tokens)
        self._end_ids = end_ids
        self._enders = enders(request, end_ids)

    @property
    def generated(self) -> Sequence[int]:
        return self.tokens[self._prompt_count :]

    @property
    def pending_count(self) -> int:
        """Tokens that must be computed before the next can be drawn."""
        return len(self.tokens) - self.computed_count

    @property
    def prefill_left(self) -> int:
        """Tokens that came with the request and are still to be computed."""
        return max(self._given_count - self.computed_count, 0)

    @property
    def block_count(self) -> int:
        """Blocks of the cache that its tokens take, with those still to be computed."""
        return blocks_of(len(self.tokens))

    def is_at_limit(self, context_length: int) -> bool:
        generated_count = len(self.tokens) - self._prompt_count
        return generated_count >= self.request.max_tokens or len(self.tokens) >= context_length

    def choices(self) -> bytes | None:
        """What its form lets it draw, one bit for each token; None: anything. Raises Failure."""
        if self.form is None:
            return None
        return choose_from(self.form.allowed(), self.request, len(self.generated), self._end_ids)

    def end_of_form(self) -> Output:
        """What to say when there is no choice left."""
        assert self.form is not None
        if self.form.is_complete:
            return Output(self.key, finish=FinishReason.STOP)
        return Output(self.key, failure=invalid("guided", "the model has no token that the form could go on with"))

    def take(self, token: int, context_length: int, logprobs: TokenLogprobs | None = None) -> Output:
        """Add what was drawn, or end with it."""
        may_end = len(self.tokens) - self._prompt_count >= self.request.stop.min_tokens
        if may_end and token in self._enders:
            return Output(self.key, finish=FinishReason.STOP)
        if self.form is not None:
            self.form.take(token)
        self.tokens.append(token)
        finish = FinishReason.LENGTH if self.is_at_limit(context_length) else None
        return Output(self.key, (token,), finish, logprobs=None if logprobs is None else (logprobs,))


def blocks_of(token_count: int) -> int:
    return -(-token_count // KV_BLOCK_TOKENS)


class Batch:
    """All sequences that run. piece_tokens: how much of a prompt a step computes, from 2 to 63 tokens.

    is_cancelled: whether nobody wants the request with this key any more. Asked between all parts of a step, so that
    such a request costs no more than the part that is under way.

    counts: an EngineLoad without ranks. It is never changed, only replaced, so another thread may read it.
    """

    def __init__(
        self, llama: Llama, *, streams: int, piece_tokens: int, is_cancelled: Callable[[int], bool] = lambda _: False
    ) -> None:
        assert PIECE_TOKENS_MIN <= piece_tokens <= PIECE_TOKENS_MAX
        self._llama = llama
        self._piece_tokens = piece_tokens
        self._streams: list[Running | None] = [None] * streams
        self._running: dict[int, Running] = {}
        self._is_cancelled = is_cancelled
        self.counts = EngineLoad(0, ())

    @property
    def is_empty(self) -> bool:
        return not self._running

    def add(self, running: Running) -> None:
        assert (running.form is None) == (running.request.guided is None)
        # The lowest stream, because a step computes a filler for each idle stream below the highest in use.
        running.stream = self._streams.index(None)
        self._streams[running.stream] = running
        self._running[running.key] = running

    def remove(self, key: int) -> None:
        """Idempotent."""
        running = self._running.pop(key, None)
        if running is not None:
            self._streams[running.stream] = None
            self._llama.forget(running.stream)

    def step(self) -> list[Output]:
        """Bring every sequence on. Raises what llama.cpp raises when it cannot go on."""
        self._remove_cancelled()
        at_limit = [one for one in self._running.values() if one.is_at_limit(self._llama.context_length)]
        outputs = [Output(one.key, finish=FinishReason.LENGTH) for one in at_limit]
        self._remove_ended(outputs)
        self._compute_piece()
        self._remove_cancelled()
        if self._running:
            drawn = self._advance()
            self._remove_ended(drawn)
            outputs += drawn
        return outputs

    def _remove_cancelled(self) -> None:
        for key in [key for key in self._running if self._is_cancelled(key)]:
            self.remove(key)

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
                self._count(running, prefill=size)
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
            is_prefill = running.prefill_left > 0
            running.computed_count += 1
            self._count(running, prefill=int(is_prefill))
            if running.pending_count == 0 and not self._is_cancelled(running.key):
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
        output = running.take(token, self._llama.context_length, logprobs)
        self._count(running, generated=len(output.token_ids))
        return output

    def _decode(self, rows: Sequence[Row]) -> None:
        self._llama.decode(rows)
        self.counts = replace(self.counts, steps=self.counts.steps + 1)

    def _count(self, running: Running, *, prefill: int = 0, generated: int = 0) -> None:
        counts = self.counts
        late = prefill + generated if self._is_cancelled(running.key) else 0
        self.counts = replace(
            counts,
            prefill_tokens=counts.prefill_tokens + prefill,
            generated_tokens=counts.generated_tokens + generated,
            tokens_after_cancel=counts.tokens_after_cancel + late,
        )
