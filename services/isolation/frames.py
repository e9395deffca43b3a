"""Messages between a process, its fork server and its helpers: length, kind, payload.

Job socket: JOB goes to the helper; ANSWER, REFUSAL, NO_MEMORY or BUG comes back.

Control socket: CONTENT goes to the fork server, and LOADED comes back, or one of REFUSAL, NO_MEMORY and BUG. Then FORK
(with the helper's end of a new job socket) and KILL go there; FORKED or NOT_FORKED comes back for each FORK, and EXITED
once for each FORKED.
"""

import json
import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from services.core.errors import Failure, Reason

HEAD = struct.Struct("!IB")
HELPER = struct.Struct("!I")
"""The payload of FORK, KILL and FORKED: a number that names the helper."""
HELPER_AND_STATUS = struct.Struct("!Ii")
"""The payload of EXITED and NOT_FORKED: the helper; its return code as `subprocess` gives it, or an errno."""


class Kind(IntEnum):
    """What a message is."""

    CONTENT = 0
    JOB = 1
    ANSWER = 2
    REFUSAL = 3
    NO_MEMORY = 4
    BUG = 5
    FORK = 6
    KILL = 7
    LOADED = 8
    FORKED = 9
    NOT_FORKED = 10
    EXITED = 11


ANSWERS = frozenset({Kind.ANSWER, Kind.REFUSAL, Kind.NO_MEMORY, Kind.BUG})


class Frame(NamedTuple):
    """A message. `payload`: a Failure for REFUSAL (see `packed`), a traceback for BUG."""

    kind: Kind
    payload: bytes = b""


def encode(frame: Frame) -> bytes:
    return HEAD.pack(len(frame.payload), frame.kind) + frame.payload


def take_frames(buffer: bytearray) -> Iterator[Frame]:
    """Remove the complete messages from the start of `buffer`. Raises ValueError for an unknown kind."""
    while len(buffer) >= HEAD.size:
        size, kind = HEAD.unpack_from(buffer)
        if len(buffer) < HEAD.size + size:
            return
        payload = bytes(buffer[HEAD.size : HEAD.size + size])
        del buffer[: HEAD.size + size]
        yield Frame(Kind(kind), payload)


def send(sock: socket.socket, frame: Frame) -> None:
    """Send on a blocking socket."""
    sock.sendall(encode(frame))


def receive(sock: socket.socket) -> Frame | None:
    """Receive from a blocking socket. Returns None at its end."""
    head = _receive_exactly(sock, HEAD.size)
    if head is None:
        return None
    size, kind = HEAD.unpack(head)
    payload = _receive_exactly(sock, size)
    return None if payload is None else Frame(Kind(kind), bytes(payload))


def _receive_exactly(sock: socket.socket, size: int) -> bytearray | None:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        count = sock.recv_into(view)
        if not count:
            return None
        view = view[count:]
    return found


def packed(failure: Failure) -> bytes:
    """A failure as the payload of a REFUSAL."""
    fields = (failure.reason, failure.detail, failure.param, failure.retry_after_s, dict(failure.metadata))
    return json.dumps(fields).encode()


def unpacked(payload: bytes) -> Failure:
    """The failure of a REFUSAL."""
    reason, detail, param, retry_after_s, metadata = json.loads(payload)
    return Failure(Reason(reason), detail, param=param, retry_after_s=retry_after_s, metadata=metadata)
