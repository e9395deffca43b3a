"""Recognises health checks by the first bytes of a connection, before it is set up."""

import socket

from hpack import Encoder

from services.http.h2.wire.frames import PREFACE
from services.http.server.config import PROBE_PATHS

FIRST_BYTES_MAX = 256
"""The first bytes of a connection that are looked at: over HTTP/2, settings come before the request."""
_PROBES = tuple(f"GET {path} ".encode() for path in PROBE_PATHS)
_PATHS = tuple(
    Encoder().encode([(":path", path)], huffman=is_packed)[1:] for path in PROBE_PATHS for is_packed in (False, True)
)
"""The paths as HTTP/2 has them. Whatever else has these bytes is set up early, too."""


def first_bytes(sock: socket.socket) -> bytes | None:
    """The first bytes, which stay in the socket; None: none have come. They usually come with the connection."""
    try:
        return sock.recv(FIRST_BYTES_MAX, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except OSError:  # The connection is broken; its protocol will notice.
        return b""


def is_probe(first: bytes) -> bool:
    """Whether a connection with these first bytes is a health check."""
    return first.startswith(_PROBES) or (first.startswith(PREFACE) and any(path in first for path in _PATHS))
