"""How far a client is in an answer: the position of each choice, and a checksum of the tokens up to there.

    cursor   = choice *("." choice) "-" checksum        for example 12.9e-5ad1c2f0
    choice   = position ["e"]                           "e": its finish has been delivered too
    checksum = 8 hexadecimal digits

The position is that of the next token. The checksum of one choice is the CRC-32 (zlib.crc32) of its token ids, each as
4 bytes, little-endian, without those that the client itself had sent. That of several choices is the CRC-32 of their
checksums, each as 4 bytes, little-endian.
"""

import re
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from services.core.errors import Failure, Reason
from services.core.validation import ANSWERS_MAX

CURSOR_FORM = r"([0-9]{1,10}e?(?:\.[0-9]{1,10}e?)*)-([0-9a-f]{8})"
CURSOR_CHARACTERS_MAX = 12 * ANSWERS_MAX + 9
DONE_ID = "done"
"""Over HTTP, stands in for the cursor of a client to which the answer is over: there is nothing to come back for."""


class Cursor(NamedTuple):
    """A parsed cursor: the position of each choice, whether its finish has been delivered, and the checksum."""

    positions: tuple[int, ...]
    ended: tuple[bool, ...]
    checksum: int


def parse_cursor(given: str, param: str) -> Cursor:
    """Parse a cursor. Raises INVALID_ARGUMENT, which names `param`."""
    match = re.fullmatch(CURSOR_FORM, given) if len(given) <= CURSOR_CHARACTERS_MAX else None
    if match is None:
        detail = f"{param} must be the last id of an event that you have got, such as 12-5ad1c2f0"
        raise Failure(Reason.INVALID_ARGUMENT, detail, param=param)
    choices = match[1].split(".")
    positions = tuple(int(choice.rstrip("e")) for choice in choices)
    return Cursor(positions, tuple(choice.endswith("e") for choice in choices), int(match[2], 16))


class CursorWriter:
    """The cursor of a stream as it is delivered. Call `add` for each delta; `text` is the cursor after it.

    `checksums`: of each choice.
    """

    __slots__ = ("_positions", "_texts", "checksums")

    def __init__(self, count: int) -> None:
        """`count`: choices of the answer."""
        self._positions = [0] * count
        self.checksums = [0] * count
        self._texts = ["0"] * count

    def add(self, choice: int, position: int, token_ids: Sequence[int], *, is_end: bool) -> None:
        """Count tokens of a choice from `position` on. `is_end`: its finish is delivered with them."""
        if token_ids:
            self.checksums[choice] = zlib.crc32(encoded_ids(token_ids), self.checksums[choice])
        end = self._positions[choice] = position + len(token_ids)
        self._texts[choice] = f"{end}e" if is_end else str(end)

    def position(self, choice: int) -> int:
        """The position after the last token of a choice."""
        return self._positions[choice]

    @property
    def checksum(self) -> int:
        """The checksum of all tokens."""
        return checksum_of(self.checksums)

    @property
    def text(self) -> str:
        """The cursor."""
        return f"{'.'.join(self._texts)}-{self.checksum:08x}"


def checksum_of(checksums: Sequence[int]) -> int:
    """The checksum of an answer, from those of its choices."""
    if len(checksums) == 1:
        return checksums[0]
    return zlib.crc32(b"".join([one.to_bytes(4, "little") for one in checksums]))


def encoded_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as the checksum counts them."""
    if len(token_ids) == 1:
        return token_ids[0].to_bytes(4, "little")
    column = array("I", token_ids)
    return column.tobytes()
