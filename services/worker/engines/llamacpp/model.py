"""The adapter to cyllama: a model, the caches of its sequences, and one decode at a time. Used from one thread.

It also computes log probabilities, from the same scores that tokens are drawn from.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.core.interface import TokenLogprobs
from services.core.request import Request
from services.models.llama_cpp import llama_cpp, why
from services.models.tokenizers.gguf import vocabulary_bytes
from services.worker.engines.llamacpp.sampler import build_chain, forbidden_by, is_in

CONTEXT_LENGTH_DEFAULT_MAX = 2048
_FLASH_ATTENTION_ON = 1
_ROW_COUNT_INDEPENDENT = (3, 8)
"""Weight types that compute one row exactly as they compute several: Q4_1 and Q8_0, as numbered in `ggml_type`.

F16 was seen to differ; the other types were not tested.
"""
_VECTORS = ("norm.weight", ".bias", "rope_freqs.weight")
"""Name endings of tensors that are not matrices."""


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute. `seq_id`: the sequence it belongs to. `is_scored`: a token can be drawn after it."""

    seq_id: int
    position: int
    token: int
    is_scored: bool = False


class _Model(llama_cpp.LlamaModel):  # type: ignore[misc]
    """Adds `n_vocab`, which cyllama 0.2.18 reads to return scores although its model does not define it."""

    n_vocab = 0


class Llama:
    """A loaded model with a cache of `context_length` tokens for each of its `sequences`.

    Raises ValueError if the model cannot be loaded.

    `needs_filler`: a decode of a single row would be computed differently from one of several, so it gets a filler row.
    """

    def __init__(
        self, path: Path, *, sequences: int, context_length: int | None, threads: int, decode_tokens_max: int
    ) -> None:
        llama_cpp.ggml_backend_load_all()
        self._model = _opened(path)
        if self._model.is_recurrent() or self._model.has_encoder():
            raise ValueError("only decoder models with a key-value cache can be served")
        self.needs_filler = threads > 1 or not _is_row_count_independent(path)
        vocab = self._model.get_vocab()
        self.vocab_size: int = vocab.n_vocab
        self._model.n_vocab = self.vocab_size
        self.end_ids = frozenset(token for token in range(self.vocab_size) if vocab.is_eog(token))
        self.bos_token: str = _text(vocab, vocab.token_bos())
        self.eos_token: str = _text(vocab, vocab.token_eos())
        self.chat_template: str = self._model.get_default_chat_template()
        trained: int = self._model.n_ctx_train
        self.context_length = min(context_length or CONTEXT_LENGTH_DEFAULT_MAX, trained)
        parameters = _context_parameters(
            max(sequences, self.sequences_min), self.context_length, threads, decode_tokens_max
        )
        self._context = llama_cpp.LlamaContext(self._model, parameters)
        self._batch = llama_cpp.LlamaBatch(n_tokens=decode_tokens_max, embd=0, n_seq_max=1)

    @property
    def sequences_min(self) -> int:
        """The smallest number of rows in a step."""
        return 2 if self.needs_filler else 1

    def decode(self, rows: Sequence[Row]) -> None:
        """Compute the rows, without the GIL."""
        self._batch.clear()
        for row in rows:
            self._batch.add(row.token, row.position, [row.seq_id], row.is_scored)
        self._context.decode(self._batch)

    def draw(self, row: int, request: Request, generated: Sequence[int], allowed: bytes | None = None) -> int:
        """Draw the token that follows row number `row` of the last decode, which must be scored.

        `allowed`: one bit for each token, at least one of them set; None: all tokens are allowed.
        """
        token = self._sample(row, request, generated)
        if allowed is None or is_in(allowed, token):
            return token
        token = self._sample(row, request, generated, forbidden_by(allowed, self.vocab_size))
        if not is_in(allowed, token):
            raise RuntimeError("the scores of all allowed tokens are minus infinity or NaN")
        return token

    def _sample(
        self, row: int, request: Request, generated: Sequence[int], forbidden: Sequence[int] | None = None
    ) -> int:
        chain = build_chain(request, generated, self.vocab_size, self.end_ids, forbidden)
        token: int = chain.sample(self._context, row)
        return token

    def logprobs(self, row: int, token: int, rival_count: int) -> TokenLogprobs:
        """The log probabilities of `token` after row number `row` of the last decode, which must be scored."""
        return token_logprobs(self._context.get_logits_ith(row), token, rival_count)

    def clear(self, seq_id: int) -> None:
        """Empty the cache of a sequence."""
        self._context.memory_seq_rm(seq_id, -1, -1)

    def forget(self, seq_id: int, position: int) -> None:
        """Remove the token at `position`, the last one, from the cache of a sequence."""
        self._context.memory_seq_rm(seq_id, position, -1)

    def token_bytes(self) -> Sequence[bytes]:
        """The text of each token; b"" for tokens without text."""
        return vocabulary_bytes(self._model)

    def close(self) -> None:
        self._batch.close()
        self._context.close()
        self._model.close()


def _is_row_count_independent(path: Path) -> bool:
    """Whether the kernels of all matrices compute one row exactly as they compute several."""
    tensors = llama_cpp.GGUFContext.from_file(str(path)).get_all_tensor_info()
    matrices = (tensor for tensor in tensors if not tensor["name"].endswith(_VECTORS))
    return all(tensor["type"] in _ROW_COUNT_INDEPENDENT for tensor in matrices)


def _opened(path: Path) -> _Model:
    """Raises ValueError if llama.cpp cannot load the model."""
    try:
        return _Model(str(path), _model_parameters())
    except ValueError as error:
        raise ValueError(f"{why(error)} Check that the file is complete: download it again") from error


def _model_parameters() -> llama_cpp.LlamaModelParams:
    parameters = llama_cpp.LlamaModelParams()
    parameters.use_extra_bufts = False
    return parameters


def _context_parameters(
    sequences: int, context_length: int, threads: int, decode_tokens_max: int
) -> llama_cpp.LlamaContextParams:
    parameters = llama_cpp.LlamaContextParams()
    parameters.n_ctx = context_length * sequences
    parameters.n_seq_max = sequences
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
    """The log probabilities of `token` and of the `rival_count` likeliest tokens, which may include it.

    Tokens with equal scores are ordered by id.
    """
    highest = max(scores)
    # `fsum` is exact: the result does not depend on the order of addition or on the Python version.
    total = highest + math.log(math.fsum([math.exp(score - highest) for score in scores]))
    top = tuple((one, scores[one] - total) for one in _likeliest(scores, rival_count))
    return TokenLogprobs(scores[token] - total, top)


def _likeliest(scores: Sequence[float], count: int) -> list[int]:
    if count == 0:
        return []
    least = heapq.nlargest(count, scores)[-1]
    candidates = [token for token, score in enumerate(scores) if score >= least]
    return sorted(candidates, key=lambda token: (-scores[token], token))[:count]
