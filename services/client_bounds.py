"""How slowly a client may read, alike over both protocols."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientBounds:
    """buffer_bytes_max: what may be unsent to one client before its request is ended with SLOW_CLIENT.

    stall_s_max: how long a client may take nothing at all while something is unsent. drain_s_max: how long it may take
    to accept what is unsent when its answer has ended.
    """

    buffer_bytes_max: int = 4 * 1024 * 1024
    stall_s_max: float = 30.0
    drain_s_max: float = 30.0
