"""Log probabilities of tokens in the two formats that OpenAI has for them."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.core.interface import TokenLogprobs
from services.frontend.api.openai.schemas import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

LOGPROB_MIN = -9999.0
"""What OpenAI's API reference gives for a token that is nearly impossible; JSON has no infinity."""

Logprobs = CompletionLogprobs | ChatLogprobs


class LogprobsWriter(Protocol):
    """Converts the log probabilities of one choice, a few tokens at a time."""

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Logprobs:
        """The `logprobs` field for the next tokens of the choice. `logprobs`: one for each token."""
        ...


class ChatLogprobsWriter:
    """The format of /v1/chat/completions."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: the bytes of each token id."""
        self._token_bytes = token_bytes

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        token_bytes = self._token_bytes
        content = []
        for token, one in zip(token_ids, logprobs, strict=True):
            raw, top = token_bytes[token], [self._top(*candidate) for candidate in one.top]
            content.append(
                ChatTokenLogprob(token=_text(raw), logprob=_finite(one.logprob), bytes=list(raw), top_logprobs=top)
            )
        return ChatLogprobs(content=content, refusal=None)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._token_bytes[token]
        return TopLogprob(token=_text(raw), logprob=_finite(logprob), bytes=list(raw))


class CompletionLogprobsWriter:
    """The format of /v1/completions. It counts the characters of the answer, whole ones as the detokenizer does.

    Two tokens with the same text, such as parts of characters, share one key of `top_logprobs`: the likelier one's.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """`token_bytes`: the bytes of each token id."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[_text(self._token_bytes[token]) for token in token_ids],
            token_logprobs=[_finite(one.logprob) for one in logprobs],
            top_logprobs=[self._top(token, one) for token, one in zip(token_ids, logprobs, strict=True)],
            text_offset=[self._advance(token) for token in token_ids],
        )

    def _top(self, token: int, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, in order, and the token itself, which OpenAI always adds: one more than requested."""
        top: dict[str, float] = {}
        for candidate, logprob in (*one.top, (token, one.logprob)):
            top.setdefault(_text(self._token_bytes[candidate]), _finite(logprob))
        return top

    def _advance(self, token: int) -> int:
        """Returns the offset of the token in characters of the answer, and moves to the next token."""
        offset = self._offset
        self._offset += len(self._decoder.decode(self._token_bytes[token]))
        return offset


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)
