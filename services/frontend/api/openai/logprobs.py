"""Log probabilities of tokens in the two formats that OpenAI has for them."""

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from operator import itemgetter
from typing import Protocol

from services.core.interface import TokenLogprobs
from services.frontend.api.openai.schemas import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from services.models.tokenizers import Vocabulary

LOGPROB_MIN = -9999.0
"""What OpenAI's API reference gives for a token that is nearly impossible; JSON has no infinity."""

Logprobs = CompletionLogprobs | ChatLogprobs


class LogprobsWriter(Protocol):
    """Converts the log probabilities of one choice, a few tokens at a time."""

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> Logprobs | None:
        """The `logprobs` field of the next part of the choice; None: it has no tokens.

        `logprobs`: one for each token. `text`: what the part shows. `is_last`: no other part follows.
        """
        ...

    def skip(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> None:
        """Like `write`, for a part that the client has already."""
        ...


class ChatLogprobsWriter:
    """The format of /v1/chat/completions."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> ChatLogprobs | None:
        del text, is_last
        content = []
        for token, one in zip(token_ids, logprobs, strict=True):
            name, raw = self._shown(token)
            top = [self._top(*candidate) for candidate in one.top]
            content.append(ChatTokenLogprob(token=name, logprob=_finite(one.logprob), bytes=raw, top_logprobs=top))
        return ChatLogprobs(content=content, refusal=None) if content else None

    def skip(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> None:
        pass  # No part depends on those before it.

    def _top(self, token: int, logprob: float) -> TopLogprob:
        name, raw = self._shown(token)
        return TopLogprob(token=name, logprob=_finite(logprob), bytes=raw)

    def _shown(self, token: int) -> tuple[str, list[int] | None]:
        """The token's text, and its bytes if it is part of the answer's text."""
        raw = self._vocabulary.token_bytes[token]
        return token_text(self._vocabulary, token), list(raw) if raw else None


_Entry = tuple[int, int, TokenLogprobs]
"""A token: where its text begins, in characters of the answer, its id, and its log probabilities."""


class CompletionLogprobsWriter:
    """The format of /v1/completions. It counts the characters of the answer as the detokenizer does.

    No offset is beyond the text: a token of a stop string, which is cut off, is at the end of the text. So a token that
    begins in text that is held back waits until that text is shown, or is known to be cut off.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0
        self._is_within = False  # The last token ends within a character.
        self._shown_count = 0
        self._waiting: list[_Entry] = []

    def prime(self, token_ids: Sequence[int], text: str) -> None:
        """Count the tokens that the client has already, and the text that it has of them."""
        self._move(self._bytes_of(token_ids))
        self._shown_count = len(text)

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> CompletionLogprobs | None:
        ready = self._take(token_ids, logprobs, text, is_last=is_last)
        return self._written(ready) if ready else None

    def skip(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool = False
    ) -> None:
        decoder, offset, is_within = self._decoder.getstate(), self._offset, self._is_within
        self._move(self._bytes_of(token_ids))
        shown_count = self._shown_count + len(text)
        if not self._waiting and self._offset == shown_count:
            self._shown_count = shown_count  # As nearly always: no token waits, and none has to be looked at by itself.
            return
        self._decoder.setstate(decoder)
        self._offset, self._is_within = offset, is_within
        self._take(token_ids, logprobs, text, is_last=is_last)

    def _take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], text: str, *, is_last: bool
    ) -> Sequence[_Entry]:
        """Add the tokens of a part. Returns those that belong to this part; the others wait."""
        self._shown_count += len(text)
        ready = self._waiting
        ready += [(self._advance(token), token, one) for token, one in zip(token_ids, logprobs, strict=True)]
        if not ready or ready[-1][0] <= self._shown_count or is_last:
            self._waiting = []
            return ready
        end = bisect_right(ready, self._shown_count, key=itemgetter(0))
        self._waiting = ready[end:]
        return ready[:end]

    def _written(self, entries: Sequence[_Entry]) -> CompletionLogprobs:
        names = [token_text(self._vocabulary, token) for _, token, _ in entries]
        return CompletionLogprobs(
            tokens=names,
            token_logprobs=[_finite(one.logprob) for _, _, one in entries],
            top_logprobs=[self._top(token, name, one) for (_, token, one), name in zip(entries, names, strict=True)],
            text_offset=[min(offset, self._shown_count) for offset, _, _ in entries],
        )

    def _top(self, token: int, name: str, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, in order, and the token itself, which OpenAI always adds: one more than requested.

        Of tokens with the same text, such as parts of characters, the chosen one has it for its key, or else the
        likeliest; the others are named by their ids.
        """
        vocabulary, top, is_among = self._vocabulary, {}, False
        for candidate, logprob in one.top:
            if candidate == token:
                text, is_among = name, True
            else:
                text = token_text(vocabulary, candidate)
                if text == name or text in top:
                    text = _id_text(candidate)
            top[text] = _finite(logprob)
        if not is_among:
            top[name] = _finite(one.logprob)
        return top

    def _advance(self, token: int) -> int:
        """Returns the offset at which the token begins, and moves to its end."""
        raw, offset, was_within = self._vocabulary.token_bytes[token], self._offset, self._is_within
        if not was_within and raw.isascii():  # As most are.
            self._offset += len(raw)
            return offset
        first = self._decoder.decode(raw[:1])
        # If the first byte does not continue the character before it, that one is U+FFFD, and the token begins after.
        is_after = was_within and first[:1] == "\ufffd" and (len(first) > 1 or bool(self._decoder.getstate()[0]))
        self._offset += len(first) + len(self._decoder.decode(raw[1:]))
        self._is_within = bool(self._decoder.getstate()[0])
        return offset + is_after

    def _move(self, raw: bytes) -> None:
        """Move to the end of all these bytes."""
        if not self._is_within and raw.isascii():
            self._offset += len(raw)
            return
        self._offset += len(self._decoder.decode(raw))
        self._is_within = bool(self._decoder.getstate()[0])

    def _bytes_of(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._vocabulary.token_bytes[token] for token in token_ids])


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """The token's text, a special token's spelling, or its id if it has neither."""
    raw = vocabulary.token_bytes[token]
    return raw.decode(errors="replace") if raw else vocabulary.special_tokens.get(token) or _id_text(token)


def _id_text(token: int) -> str:
    """How a token is named that has no text of its own. Source of the form: vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    return max(LOGPROB_MIN, logprob)  # In this order it is LOGPROB_MIN for NaN as well.
