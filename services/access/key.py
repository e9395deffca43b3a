"""The form of an API key: `ub_ID_SECRET_CHECKSUM`.

The id names the key in the keys file, in logs and to people; it is no secret. The secret has 256 random bits, so its
hash needs no salt and need not be slow. The checksum lets programs that search for leaked secrets recognise a key, and
tells a person who has lost a character on the way.
"""

import hashlib
import re
import secrets
import zlib
from dataclasses import dataclass, field

PREFIX = "ub"
ID_BYTES = 4
SECRET_BYTES = 32
FORM = re.compile(r"ub_([0-9a-f]{8})_[0-9a-f]{64}_([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that was made just now. `text`: the key itself, which is kept nowhere. `sha256`: what is kept of it."""

    id: str
    text: str = field(repr=False)

    @property
    def sha256(self) -> str:
        return hash_of(self.text)


def make_key() -> NewKey:
    """A new random key."""
    key_id = secrets.token_hex(ID_BYTES)
    body = f"{PREFIX}_{key_id}_{secrets.token_hex(SECRET_BYTES)}"
    return NewKey(key_id, f"{body}_{_checksum(body)}")


def id_of(text: str) -> str | None:
    """The id of a key; None if the text has not the form of one."""
    found = FORM.fullmatch(text)
    return None if found is None else found[1]


def is_whole(text: str) -> bool:
    """Whether the text has the form of a key, and its checksum fits: none of it was lost or mistyped."""
    found = FORM.fullmatch(text)
    return found is not None and _checksum(text[: -len(found[2]) - 1]) == found[2]


def hash_of(text: str) -> str:
    """What the keys file has of a key: its SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"
