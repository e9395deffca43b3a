"""Draws a token from the request and the tokens before it alone, so that every worker draws the same.

The randomness of the token at position g of choice c is a hash of (seed, c, g); penalties count the answer's tokens
again for each draw. Building the sampler chain costs 3 µs, plus 0.1 µs for each token that penalties count; a decode
costs 20 ms. Drawing costs 0.05 ms greedily, 0.4 ms at a temperature, and 2.5 ms with top_p over the whole vocabulary.

In a guided answer, a token that the grammar forbids is drawn again, among the allowed tokens and with other randomness.
Each allowed token thus keeps its probability relative to the other allowed ones, and the list of forbidden tokens,
which costs about 10 ms, is built only when the model leaves the grammar.
"""

import hashlib
import struct
from collections.abc import Sequence
from itertools import repeat

from services.core.request import Request
from services.models.llama_cpp import llama_cpp

_RANDOM_SEED = 0xFFFFFFFF
"""llama.cpp reads this seed as a request for a random one."""
_NEVER = float("-inf")
_PENALTY_LEAST, _PENALTY_GREATEST = 1e-30, 1e30
"""The range of repetition penalties that float32 can compute with.

Beyond it, a score divided by the penalty, or by the penalty and the temperature, would be infinite, and infinity minus
infinity undefined. Within it, a score is already larger or smaller than any other: the draw is that of the limit.
"""


def build_chain(
    request: Request,
    generated: Sequence[int],
    vocab_size: int,
    end_ids: frozenset[int],
    forbidden: Sequence[int] | None = None,
) -> llama_cpp.LlamaSampler:
    """The sampler of the token after `generated`. `forbidden`: tokens that a second draw excludes; None: first draw."""
    sampling = request.sampling
    chain = llama_cpp.LlamaSampler(llama_cpp.LlamaSamplerChainParams())
    biases = [*sampling.logit_bias, *zip(suppressed(request, len(generated), end_ids), repeat(_NEVER))]
    biases += zip(forbidden or (), repeat(_NEVER))
    if biases:
        chain.add_logit_bias(vocab_size, biases)
    if sampling.has_penalties and generated:
        repetition = min(max(sampling.repetition_penalty, _PENALTY_LEAST), _PENALTY_GREATEST)
        chain.add_penalties(len(generated), repetition, sampling.frequency_penalty, sampling.presence_penalty)
    if sampling.is_greedy:
        chain.add_greedy()
    else:
        _add_random(chain, request, len(generated), vocab_size, 0 if forbidden is None else 1)
    if sampling.has_penalties:
        for token in generated:
            chain.accept(token)
    return chain


def _add_random(chain: llama_cpp.LlamaSampler, request: Request, position: int, vocab_size: int, attempt: int) -> None:
    sampling = request.sampling
    if 0 < sampling.top_k < vocab_size:  # llama.cpp's number is signed, and `top_k` may be 2^32 - 1.
        chain.add_top_k(sampling.top_k)
    if sampling.top_p < 1:
        chain.add_top_p(sampling.top_p, 1)
    if sampling.min_p > 0:
        chain.add_min_p(sampling.min_p, 1)
    chain.add_temp(sampling.temperature)
    assert sampling.seed is not None, "preprocess sets the seed"
    chain.add_dist(seed_at(sampling.seed, request.choice, position, attempt))


def seed_at(seed: int, choice: int, position: int, attempt: int = 0) -> int:
    """32 bits of randomness for one draw of one token."""
    packed = struct.pack("<QIQ", seed, choice, position) + bytes(attempt)
    value = int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little")
    return value if value != _RANDOM_SEED else 0


def answer_end_ids(request: Request, end_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end this answer: the request's stop tokens and, unless ignored, the model's end tokens."""
    stop = request.stop
    return frozenset(stop.token_ids) if stop.ignore_eos else end_ids.union(stop.token_ids)


def suppressed(request: Request, position: int, end_ids: frozenset[int]) -> frozenset[int]:
    """The end tokens that may not be drawn yet, because the answer is shorter than `min_tokens`."""
    return answer_end_ids(request, end_ids) if position < request.stop.min_tokens else frozenset()


def drawable(allowed: bytes, request: Request, position: int, end_ids: frozenset[int]) -> bytes:
    """Remove from the mask `allowed` the end tokens that may not be drawn: before `min_tokens`, and with `ignore_eos`.

    The format is that of `Grammar.token_mask`. If no token remains, nothing can continue the answer, and it ends.
    """
    barred = suppressed(request, position, end_ids) | (end_ids if request.stop.ignore_eos else frozenset())
    mask = bytearray(allowed)
    for token in barred:
        mask[token >> 3] &= ~(1 << (token & 7))
    return bytes(mask)


def forbidden_by(allowed: bytes, vocab_size: int) -> list[int]:
    """The tokens whose bits are not set."""
    bits = f"{int.from_bytes(allowed, 'little'):0{vocab_size}b}"[::-1]  # Twice as fast as testing each bit.
    return [token for token, bit in enumerate(bits[:vocab_size]) if bit == "0"]


def is_in(mask: bytes, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)
