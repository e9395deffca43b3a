"""How GPT-2's vocabulary, and all that follow it, spell bytes as characters that print."""

from itertools import count


def byte_of_character() -> dict[str, bytes]:
    """Bytes that print in Latin-1 as themselves, the rest from U+0100 on. Source: `bytes_to_unicode` of GPT-2."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return {chr(value if value in printing else next(spare)): bytes((value,)) for value in range(256)}
