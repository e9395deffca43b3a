"""Continuous batching: each step advances every sequence by one token, and one prompt by one chunk.

The shape of every decode follows fixed rules that keep results exact; the package docstring explains them. Cost of a
step: one decode with a row for each sequence number up to the highest in use, and at most one decode of a prompt chunk.

A helper process computes which tokens may follow in a guided answer, while this computes the scores of all. If the
scores are there first, the step waits for the helper, GUIDE_WAIT_S at most. Then it goes on without this sequence, and
the next step computes its last token again.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import structlog

from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.worker.engine import EngineLoad, Output
from services.worker.engines.llamacpp.model import Llama, Row
from services.worker.engines.llamacpp.sequence import LlamaSequence

log = structlog.get_logger()

CHUNK_TOKENS_MIN = 2
CHUNK_TOKENS_MAX = 63
"""A prompt chunk of another size is computed by another kernel: see the package."""
GUIDE_WAIT_S = 0.02
"""How long a step waits for the helpers of all its guided answers together: about as long as a decode takes."""
GUIDE_WAIT_ALONE_S = 0.2
"""The same for the only answer of a step, which holds up none: less than it costs to compute its last token again."""
_FILLER = 0
"""Any token id is valid here: the result is discarded."""


class Batch:
    """All sequences that run.

    `chunk_tokens`: how much of a prompt a step computes, from 2 to 63 tokens.

    `is_cancelled`: whether the request with this key was cancelled. It is checked between the parts of a step, so a
    cancelled request costs at most the part in progress.

    `counts`: an EngineLoad without ranks. It is replaced and never mutated, so other threads may read it.
    """

    def __init__(
        self, llama: Llama, *, sequences: int, chunk_tokens: int, is_cancelled: Callable[[int], bool] = lambda _: False
    ) -> None:
        assert CHUNK_TOKENS_MIN <= chunk_tokens <= CHUNK_TOKENS_MAX
        self._llama = llama
        self._chunk_tokens = chunk_tokens
        self._slots: list[LlamaSequence | None] = [None] * sequences  # By `seq_id`.
        self._by_key: dict[int, LlamaSequence] = {}
        self._is_cancelled = is_cancelled
        self.counts = EngineLoad(0, ())

    @property
    def is_empty(self) -> bool:
        return not self._by_key

    def add(self, sequence: LlamaSequence) -> None:
        assert (sequence.guide is None) == (sequence.request.guided is None)
        # The lowest free number: a step computes a filler for each unused number below the highest in use.
        sequence.seq_id = self._slots.index(None)
        self._slots[sequence.seq_id] = sequence
        self._by_key[sequence.key] = sequence

    def remove(self, key: int) -> None:
        """Idempotent."""
        sequence = self._by_key.pop(key, None)
        if sequence is not None:
            self._slots[sequence.seq_id] = None
            self._llama.clear(sequence.seq_id)

    def step(self) -> list[Output]:
        """Advance every sequence. Raises the exception of llama.cpp if a decode fails."""
        self._remove_cancelled()
        at_limit = [one for one in self._by_key.values() if one.is_at_limit(self._llama.context_length)]
        outputs = [Output(one.key, finish=FinishReason.LENGTH) for one in at_limit]
        self._remove_ended(outputs)
        self._compute_chunk()
        self._remove_cancelled()
        if self._by_key:
            drawn = self._advance()
            self._remove_ended(drawn)
            outputs += drawn
        return outputs

    def _remove_cancelled(self) -> None:
        for key in [key for key in self._by_key if self._is_cancelled(key)]:
            self.remove(key)

    def _remove_ended(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                self.remove(output.key)

    def _compute_chunk(self) -> None:
        """Compute a chunk of the oldest unfinished prompt, except its last token, which `_advance` computes."""
        for sequence in self._by_key.values():
            size = min(sequence.pending_count - 1, self._chunk_tokens)
            if size >= CHUNK_TOKENS_MIN:
                start = sequence.computed_count
                tokens = sequence.tokens[start : start + size]
                self._decode([Row(sequence.seq_id, start + index, token) for index, token in enumerate(tokens)])
                sequence.computed_count += size
                self._count(sequence, prefill=size)
                return

    def _advance(self) -> list[Output]:
        """Compute one token of every sequence, and draw the next for each whose tokens are all computed."""
        used = 1 + max(sequence.seq_id for sequence in self._by_key.values())
        seq_ids = range(max(used, self._llama.sequences_min))
        self._decode([self._row(seq_id) for seq_id in seq_ids])
        wait_until = time.monotonic() + (GUIDE_WAIT_S if len(self._by_key) > 1 else GUIDE_WAIT_ALONE_S)
        outputs = []
        for seq_id in seq_ids:
            sequence = self._at(seq_id)
            if sequence is None:
                self._llama.clear(seq_id)
                continue
            is_prefill = sequence.prefill_left > 0
            sequence.computed_count += 1
            self._count(sequence, prefill=int(is_prefill))
            if sequence.pending_count == 0 and not self._is_cancelled(sequence.key):
                if sequence.wait_guide(wait_until - time.monotonic()):
                    outputs.append(self._draw(sequence))
                else:
                    sequence.computed_count -= 1
                    self._llama.forget(seq_id, sequence.computed_count)
        return outputs

    def _at(self, seq_id: int) -> LlamaSequence | None:
        return self._slots[seq_id] if seq_id < len(self._slots) else None

    def _row(self, seq_id: int) -> Row:
        sequence = self._at(seq_id)
        if sequence is None:
            return Row(seq_id, 0, _FILLER, is_scored=self._llama.needs_filler)
        position = sequence.computed_count
        is_scored = self._llama.needs_filler or sequence.pending_count == 1
        return Row(seq_id, position, sequence.tokens[position], is_scored)

    def _draw(self, sequence: LlamaSequence) -> Output:
        try:
            return self._draw_next(sequence)
        except Failure as failure:
            return Output(sequence.key, failure=failure)
        except Exception:
            # A bug in one request's draw must not end the others.
            log.exception("drawing a token failed", key=sequence.key)
            return Output(sequence.key, failure=Failure(Reason.ENGINE_ERROR, "llama.cpp could not draw a token"))

    def _draw_next(self, sequence: LlamaSequence) -> Output:
        mask = sequence.token_mask()
        if mask is not None and not any(mask):
            return sequence.end_of_grammar()
        request, row = sequence.request, sequence.seq_id
        token = self._llama.draw(row, request, sequence.generated, mask)
        rival_count = request.logprobs
        logprobs = None if rival_count is None else self._llama.logprobs(row, token, rival_count)
        output = sequence.append(token, self._llama.context_length, logprobs)
        self._count(sequence, generated=len(output.token_ids))
        return output

    def _decode(self, rows: Sequence[Row]) -> None:
        self._llama.decode(rows)
        self.counts = replace(self.counts, steps=self.counts.steps + 1)

    def _count(self, sequence: LlamaSequence, *, prefill: int = 0, generated: int = 0) -> None:
        counts = self.counts
        late = prefill + generated if self._is_cancelled(sequence.key) else 0
        self.counts = replace(
            counts,
            prefill_tokens=counts.prefill_tokens + prefill,
            generated_tokens=counts.generated_tokens + generated,
            tokens_after_cancel=counts.tokens_after_cancel + late,
        )
