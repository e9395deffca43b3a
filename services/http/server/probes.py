"""Recognises health checks by the first bytes of a connection, before it is set up."""

import socket

from services.http.server.config import PROBE_PATHS

_PROBES = tuple(f"GET {path} ".encode() for path in PROBE_PATHS)
_PROBE_BYTES = max(map(len, _PROBES))


def first_bytes(sock: socket.socket) -> bytes | None:
    """The first bytes, which stay in the socket; None: none have come. They usually come with the connection."""
    try:
        return sock.recv(_PROBE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:  # The connection is broken; its protocol will notice.
        return b""


def is_probe(first: bytes) -> bool:
    """Whether a connection with these first bytes is a health check."""
    return first.startswith(_PROBES)
