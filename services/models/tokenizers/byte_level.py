"""The mocker's tokeniser: each token is one byte."""

from collections.abc import Mapping, Sequence
from itertools import chain, count
from types import MappingProxyType

from services.models.tokenizers.inside import CHARACTERS_INSIDE_MAX

EOS = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 is the end token."""

    token_bytes: Sequence[bytes] = (*(bytes((value,)) for value in range(256)), b"")

    special_tokens: Mapping[int, str] = {EOS: "<|end|>"}

    token_characters_max = 1

    added_tokens: Mapping[str, int] = MappingProxyType({})

    rewrites_text = False

    inside_characters_max = CHARACTERS_INSIDE_MAX

    def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
        """The UTF-8 bytes of `text`. The vocabulary has no special tokens to add or to recognise."""
        del add_special, parse_special
        return list(text.encode("utf-8", errors="replace"))

    def encode_pieces(self, pieces: Sequence[str | int]) -> list[int]:
        """See `Tokenizer`."""
        ids = ([piece] if isinstance(piece, int) else self.encode(piece, add_special=False) for piece in pieces)
        return list(chain.from_iterable(ids))


def byte_of_character() -> dict[str, bytes]:
    """The characters that byte-level vocabularies use for bytes. Source: `bytes_to_unicode` of GPT-2.

    Printable Latin-1 characters stand for themselves; the other bytes use characters from U+0100 on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return {chr(value if value in printing else next(spare)): bytes((value,)) for value in range(256)}
