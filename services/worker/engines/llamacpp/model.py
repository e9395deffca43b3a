"""The seam to cyllama: a model, its cache of sequences, and one decode at a time. Used from one thread."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.interface import TokenLogprobs
from services.core.request import Request
from services.models.llama_cpp import llama_cpp
from services.models.tokenizers.gguf import vocabulary_bytes
from services.worker.engines.llamacpp.grammar import Forms
from services.worker.engines.llamacpp.sampler import build_chain, forbidden_by, is_in

CONTEXT_LENGTH_DEFAULT_MAX = 2048
_FLASH_ATTENTION_ON = 1
_ALIKE_ALONE = (3, 8)
"""Q4_1 and Q8_0. F16 was seen to differ; others were not tried. Numbers as in `ggml_type`."""
_VECTORS = ("norm.weight", ".bias", "rope_freqs.weight")
"""How the names of tensors end that are no matrices."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute. stream: whose cache it goes to; is_scored: a next token can be drawn after it."""

    stream: int
    position: int
    token: int
    is_scored: bool = False


class _Model(llama_cpp.LlamaModel):  # type: ignore[misc]
    """cyllama 0.2.18 asks the model for `n_vocab` when it is asked for scores, and its model has none."""

    n_vocab = 0


class Llama:
    """A loaded model with `streams` caches of `context_length` tokens. Raises ValueError when it cannot be loaded.

    pads: one token alone would be computed in another way than among others, so that it needs a filler beside it.
    """

    def __init__(
        self, path: Path, *, streams: int, context_length: int | None, threads: int, decode_tokens_max: int
    ) -> None:
        llama_cpp.ggml_backend_load_all()
        self._model = _Model(str(path), _model_parameters())
        if self._model.is_recurrent() or self._model.has_encoder():
            raise ValueError("only decoder models with a key-value cache can be served")
        self.pads = threads > 1 or not _is_alike_alone(path)
        vocab = self._model.get_vocab()
        self.vocab_size: int = vocab.n_vocab
        self._model.n_vocab = self.vocab_size
        self.end_ids = frozenset(token for token in range(self.vocab_size) if vocab.is_eog(token))
        self.forms = Forms(vocabulary_bytes(self._model), self.end_ids)
        self.bos_token: str = _text(vocab, vocab.token_bos())
        self.eos_token: str = _text(vocab, vocab.token_eos())
        self.chat_template: str = self._model.get_default_chat_template()
        trained: int = self._model.n_ctx_train
        self.context_length = min(context_length or CONTEXT_LENGTH_DEFAULT_MAX, trained)
        parameters = _context_parameters(
            max(streams, self.streams_min), self.context_length, threads, decode_tokens_max
        )
        self._context = llama_cpp.LlamaContext(self._model, parameters)
        self._batch = llama_cpp.LlamaBatch(n_tokens=decode_tokens_max, embd=0, n_seq_max=1)

    @property
    def streams_min(self) -> int:
        """How many sequences a step needs at least."""
        return 2 if self.pads else 1

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute the rows. Other threads run meanwhile."""
        self._batch.clear()
        for row in rows:
            self._batch.add(row.token, row.position, [row.stream], row.is_scored)
        self._context.decode(self._batch)

    def draw(self, row: int, request: Request, generated: Sequence[int], allowed: bytes | None = None) -> int:
        """The token that follows row number `row` of the last decode, which must be scored.

        allowed: one bit for each token, at least one of them set; None: all are allowed.
        """
        token = self._sample(row, request, generated)
        if allowed is None or is_in(allowed, token):
            return token
        token = self._sample(row, request, generated, forbidden_by(allowed, self.vocab_size))
        if not is_in(allowed, token):
            raise RuntimeError("the scores of all allowed tokens are minus infinity or no numbers")
        return token

    def _sample(
        self, row: int, request: Request, generated: Sequence[int], forbidden: Sequence[int] | None = None
    ) -> int:
        chain = build_chain(request, generated, self.vocab_size, self.end_ids, forbidden)
        token: int = chain.sample(self._context, row)
        return token

    def logprobs(self, row: int, token: int, rival_count: int) -> TokenLogprobs:
        """Of `token` after row number `row` of the last decode, which must be scored."""
        return token_logprobs(self._context.get_logits_ith(row), token, rival_count)

    def forget(self, stream: int) -> None:
        """Empty the stream's cache."""
        self._context.memory_seq_rm(stream, -1, -1)

    def close(self) -> None:
        self._batch.close()
        self._context.close()
        self._model.close()


def _is_alike_alone(path: Path) -> bool:
    """Whether all matrices are of types whose kernels were seen to compute one row as they compute many."""
    tensors = llama_cpp.GGUFContext.from_file(str(path)).get_all_tensor_info()
    return all(tensor["type"] in _ALIKE_ALONE for tensor in tensors if not tensor["name"].endswith(_VECTORS))


def _model_parameters() -> llama_cpp.LlamaModelParams:
    parameters = llama_cpp.LlamaModelParams()
    parameters.use_extra_bufts = False
    return parameters


def _context_parameters(
    streams: int, context_length: int, threads: int, decode_tokens_max: int
) -> llama_cpp.LlamaContextParams:
    parameters = llama_cpp.LlamaContextParams()
    parameters.n_ctx = context_length * streams
    parameters.n_seq_max = streams
    parameters.n_batch = decode_tokens_max
    parameters.n_ubatch = decode_tokens_max
    parameters.n_threads = threads
    parameters.n_threads_batch = threads
    parameters.flash_attn_type = _FLASH_ATTENTION_ON
    parameters.kv_unified = False
    parameters.swa_full = True
    return parameters


def _text(vocab: llama_cpp.LlamaVocab, token: int) -> str:
    text: str = vocab.get_text(token) if token >= 0 else ""
    return text


def token_logprobs(scores: Sequence[float], token: int, rival_count: int) -> TokenLogprobs:
    """Of `token`, and of the `rival_count` likeliest tokens, itself among them or not; of equals the lower id first."""
    highest = max(scores)
    # An exact sum, so that it does not depend on the order of addition, nor on the version of Python.
    total = highest + math.log(math.fsum([math.exp(score - highest) for score in scores]))
    top = tuple((one, scores[one] - total) for one in _likeliest(scores, rival_count))
    return TokenLogprobs(scores[token] - total, top)


def _likeliest(scores: Sequence[float], count: int) -> list[int]:
    if count == 0:
        return []
    least = heapq.nlargest(count, scores)[-1]
    candidates = [token for token, score in enumerate(scores) if score >= least]
    return sorted(candidates, key=lambda token: (-scores[token], token))[:count]
