"""Log probabilities of tokens in the two shapes that OpenAI has for them."""

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from services.core.interface import TokenLogprobs

LOGPROB_MIN = -9999.0
"""What OpenAI's reference has for a token that is next to impossible; JSON has no infinity."""


class LogprobsWriter(Protocol):
    """Writes the log probabilities of one choice, piece by piece."""

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The choice's `logprobs` for its next tokens, of which each has one of `logprobs`."""
        ...


class ChatLogprobs:
    """The shape of /v1/chat/completions."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """token_bytes: of each token id."""
        self._token_bytes = token_bytes

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(token, one.logprob) | {"top_logprobs": [self._entry(*rival) for rival in one.top]}
            for token, one in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._token_bytes[token]
        return {"token": _shown(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """The shape of /v1/completions. It counts the answer's characters, whole ones as present does.

    Two tokens that look alike, halves of characters above all, are one key of `top_logprobs`: the likelier one's.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """token_bytes: of each token id."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {
            "tokens": [_shown(self._token_bytes[token]) for token in token_ids],
            "token_logprobs": [_finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(token, one) for token, one in zip(token_ids, logprobs, strict=True)],
            "text_offset": [self._pass(token) for token in token_ids],
        }

    def _top(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """The rivals, likeliest first, and the token itself, as OpenAI's always has it: one more than were asked."""
        top: dict[str, float] = {}
        for rival, logprob in (*one.top, (token, one.logprob)):
            top.setdefault(_shown(self._token_bytes[rival]), _finite(logprob))
        return top

    def _pass(self, token: int) -> int:
        """Where the token begins, in characters of the answer; go on to the next."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._token_bytes[token]))
        return offset


def _shown(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)
