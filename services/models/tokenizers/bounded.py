"""A tokeniser for the process that holds everybody's streams: it raises an exception for texts that might crash it."""

from collections.abc import Mapping, Sequence

from services.models.tokenizers import Tokenizer


class TooLongInside(Exception):
    """The text is longer than `inside_characters_max`."""


class BoundedTokenizer:
    """The same tokeniser. Its methods raise TooLongInside for texts that only a helper process may tokenise."""

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner
        self.token_bytes: Sequence[bytes] = inner.token_bytes
        self.special_tokens: Mapping[int, str] = inner.special_tokens
        self.token_characters_max = inner.token_characters_max
        self.inside_characters_max = inner.inside_characters_max
        self.added_tokens: Mapping[str, int] = inner.added_tokens
        self.rewrites_text = inner.rewrites_text

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        self._check(len(text))
        return self._inner.encode(text, add_special=add_special, parse_special=parse_special)

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        self._check(sum(len(piece) for piece in pieces if isinstance(piece, str)))
        return self._inner.encode_pieces(pieces)

    def _check(self, characters: int) -> None:
        if characters > self.inside_characters_max:
            raise TooLongInside
