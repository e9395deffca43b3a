"""One request in the mocker. Each token is a function of all tokens before it."""

import hashlib
import math
import struct
from array import array
from itertools import chain

from services.core.interface import TokenLogprobs
from services.core.request import FinishReason, Request
from services.models.tokenizers.byte_level import EOS
from services.worker.engine import Output

_CHARACTERS = [*"etaoinshrdlcumwfgypb", *" " * 6, ",", ".", "\n", *"éßдא", *"漢字語", *"🎉🚀"]
_EOS_ODDS = 400
"""At the start of a character, the answer ends with a probability of one in this number."""
_SHAPE = struct.Struct("3dI3d")  # Formatting the floats as text would take most of the time of a submission.
_GREEDY = (0.0, 1.0, 0.0, 0)
"""Temperature, top_p, min_p and top_k of every greedy request."""


def _next_bytes() -> dict[bytes, bytes]:
    """Map each incomplete character to the bytes that may follow; a byte that occurs twice is twice as likely."""
    follow: dict[bytes, bytes] = {}
    for character in _CHARACTERS:
        encoded = character.encode()
        for cut in range(len(encoded)):
            follow[encoded[:cut]] = follow.get(encoded[:cut], b"") + encoded[cut : cut + 1]
    return follow


_FOLLOW = _next_bytes()
_BYTES = bytes(range(EOS))


def can_reach_min_tokens(request: Request) -> bool:
    """Whether some token may be drawn before `min_tokens`."""
    return request.stop.min_tokens == 0 or not set(_BYTES).issubset(request.stop.token_ids)


def _advance(begun: bytes, token: int) -> bytes:
    """The incomplete character after one more token; empty if the token completes it or starts none of ours."""
    begun = begun + bytes((token,)) if token < EOS else b""
    return begun if begun in _FOLLOW else b""


class MockerSequence:
    """One request: the hash over all its tokens, the character that is incomplete, and the tokens left to compute.

    `token_count`: tokens of prompt and answer. `prefill_left`: tokens to compute before the next one can be drawn.
    `emitted_count`: tokens that this process has drawn.
    """

    def __init__(self, key: int, request: Request) -> None:
        self.key = key
        self.request = request
        self.generated_count = len(request.generated_token_ids)
        self._max_tokens = request.max_tokens
        self.emitted_count = 0
        self.is_cancelled = False
        self.token_count = self.prefill_left = request.token_count
        self._hash = hashlib.blake2b(_sampling_bytes(request), digest_size=8)
        self._hash.update(array("I", request.prompt_token_ids + request.generated_token_ids).tobytes())
        self._begun = b""
        for token in request.generated_token_ids:
            self._begun = _advance(self._begun, token)

    def step(self, context_length: int) -> Output:
        """Draw one token, or end the answer."""
        if self._is_at_limit(context_length):
            return Output(self.key, finish=FinishReason.LENGTH)
        token = self._draw_token()
        if token is None:
            return Output(self.key, finish=FinishReason.STOP)
        logprobs = None if self.request.logprobs is None else (self._logprobs(token, self.request.logprobs),)
        self._hash.update(struct.pack("I", token))
        self._begun = _advance(self._begun, token)
        self.generated_count += 1
        self.token_count += 1
        self.emitted_count += 1
        finish = FinishReason.LENGTH if self._is_at_limit(context_length) else None
        return Output(self.key, (token,), finish, logprobs=logprobs)

    def _is_at_limit(self, context_length: int) -> bool:
        return self.generated_count >= self._max_tokens or self.token_count >= context_length

    def _logprobs(self, token: int, top: int) -> TokenLogprobs:
        """Derived from all tokens so far, like the token itself. Each rival is half as likely as the one before it."""
        rivals = list(dict.fromkeys((token, *_candidates(_FOLLOW[self._begun], self._value()))))
        shift = self._value() % 1000 * 1e-3
        values = [(rival, -math.log(2) * (rank + 1) - shift) for rank, rival in enumerate(rivals)]
        return TokenLogprobs(values[0][1], tuple(values[:top]))

    def _value(self) -> int:
        """The hash of all tokens so far."""
        return int.from_bytes(self._hash.copy().digest(), "little")

    def _draw_token(self) -> int | None:
        stop = self.request.stop
        value = self._value()
        may_stop = self.generated_count >= stop.min_tokens
        if may_stop and not stop.ignore_eos and not self._begun and value % _EOS_ODDS == 0:
            return None
        fitting = _candidates(_FOLLOW[self._begun], value // _EOS_ODDS)
        if may_stop:
            return None if fitting[0] in stop.token_ids else fitting[0]
        return next(token for token in chain(fitting, _BYTES) if token not in stop.token_ids)


def _candidates(follow: bytes, value: int) -> bytes:
    start = value % len(follow)
    return follow[start:] + follow[:start]


def _sampling_bytes(request: Request) -> bytes:
    """Everything but the tokens that a draw depends on. Greedy draws depend on penalties and biases alone."""
    sampling = request.sampling
    shape = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k)
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    rest = (sampling.logit_bias, () if sampling.is_greedy else (sampling.seed, request.choice))
    return _SHAPE.pack(*(_GREEDY if sampling.is_greedy else shape), *penalties) + repr(rest).encode()
