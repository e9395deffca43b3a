"""The mocker's tokeniser: a token is a byte."""

from collections.abc import Sequence
from itertools import count

EOS = 256
VOCAB_SIZE = 257


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8; 256 is the end token."""

    token_bytes: Sequence[bytes] = (*(bytes((value,)) for value in range(256)), b"")

    token_characters_max = 1

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """The UTF-8 bytes of `text`. There is nothing special to add."""
        del add_special
        return list(text.encode("utf-8", errors="replace"))


def byte_of_character() -> dict[str, bytes]:
    """Bytes that print in Latin-1 as themselves, the rest from U+0100 on. Source: `bytes_to_unicode` of GPT-2."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return {chr(value if value in printing else next(spare)): bytes((value,)) for value in range(256)}
