"""The settings of both ends. Source: RFC 9113, section 6.5."""

import struct

from services.http.h1.parser import HEAD_BYTES_MAX
from services.http.h2.flow_control import LARGEST_WINDOW, STREAM_WINDOW_BYTES
from services.http.h2.wire.frames import FRAME_BYTES_MAX, SETTINGS, ErrorCode, H2Error, frame

STREAMS_MAX = 1024
"""Streams that a client may have open on one connection. A reset one counts until its task has ended."""

ENABLE_PUSH = 0x2
MAX_CONCURRENT_STREAMS = 0x3
INITIAL_WINDOW_SIZE = 0x4
MAX_FRAME_SIZE = 0x5
MAX_HEADER_LIST_SIZE = 0x6
NO_RFC7540_PRIORITIES = 0x9
"""RFC 9218, section 2.1: the server ignores the priorities of RFC 7540."""
_FRAME_SIZE_MAX = 2**24 - 1
_SETTING = struct.Struct(">HI")


def own_settings() -> bytes:
    """The SETTINGS frame of a server."""
    settings = {
        MAX_CONCURRENT_STREAMS: STREAMS_MAX,
        INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
        MAX_HEADER_LIST_SIZE: HEAD_BYTES_MAX,
        NO_RFC7540_PRIORITIES: 1,
    }
    return frame(SETTINGS, 0, 0, b"".join([_SETTING.pack(name, value) for name, value in settings.items()]))


def settings_in(payload: bytes) -> dict[int, int]:
    """The settings of a client, each with the last of its values. Raises H2Error."""
    if len(payload) % _SETTING.size:
        raise H2Error(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame that is cut short")
    settings = {}
    for name, value in _SETTING.iter_unpack(payload):
        _check(name, value)
        settings[name] = value
    return settings


def _check(name: int, value: int) -> None:
    if name == ENABLE_PUSH and value > 1:
        raise H2Error(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
    if name == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
        raise H2Error(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {value}")
    if name == MAX_FRAME_SIZE and not FRAME_BYTES_MAX <= value <= _FRAME_SIZE_MAX:
        raise H2Error(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}")
