"""What a client wants to become of its request when it leaves, by its headers or metadata."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from services.core.errors import invalid
from services.core.generation.kept import ID_BYTES, RANDOM_ID, Generation, Kept
from services.core.tenant import Tenant
from services.core.validation import duration_s_of

ON_DISCONNECT = "X-On-Disconnect"
DETACH_GRACE = "X-Detach-Grace"
GENERATION_ID = "X-Unbroken-Generation-Id"
OnDisconnect = Literal["cancel", "continue"]
DETACH_GRACE_S_MAX = 86_400.0
"""One day. Workers lower it to their own limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepConfig:
    """`on_disconnect`: what becomes of requests that say nothing. `grace_s`: how long those wait that give no time."""

    on_disconnect: OnDisconnect = "cancel"
    grace_s: float = 30.0


def kept_of(
    headers: Mapping[str, str], request_id: str, config: KeepConfig, tenant: Tenant, *, is_id_given: bool
) -> Kept | None:
    """What keeps the answer when its client leaves; None if it then ends.

    `headers`: by lower-case names. `is_id_given`: the client has chosen the request id. If it has room for 128 random
    bits, it is the id of the answer as well, and the client can come back without having got anything.

    Raises INVALID_ARGUMENT.
    """
    wish = headers.get(ON_DISCONNECT.lower(), config.on_disconnect).strip().lower()
    if wish not in ("cancel", "continue"):
        raise invalid(ON_DISCONNECT, f"{ON_DISCONNECT} must be cancel or continue")
    grace_s = duration_s_of(headers, DETACH_GRACE, DETACH_GRACE_S_MAX)
    if wish == "cancel":
        return None
    given = _random_bytes(request_id)
    is_told = given is not None and is_id_given
    grace_s = config.grace_s if grace_s is None else grace_s
    generation_id = given or secrets.token_bytes(ID_BYTES)
    return Kept(generation=Generation(generation_id, grace_s, is_told=is_told, tenant=tenant))


def parse_generation_id(given: str, param: str) -> bytes:
    """The id of an answer, as its `id` or as the header has it. Raises INVALID_ARGUMENT, which names `param`."""
    if (generation_id := generation_id_of(given)) is None:
        raise invalid(param, f"{param} must be the id of an answer: 32 hexadecimal digits, or a UUID")
    return generation_id


def generation_id_of(given: str) -> bytes | None:
    """The same; None if it has not the form of an id."""
    return _random_bytes(re.sub("^(chatcmpl|cmpl)-", "", given))


def _random_bytes(given: str) -> bytes | None:
    """The 128 bits of a RANDOM_ID; None if it is none."""
    return bytes.fromhex(given.replace("-", "")) if RANDOM_ID.fullmatch(given) else None
