"""The attacks of the bench are what their names say: whole frames, and few different ones."""

import pytest

from bench.clients.h2_attacks import ATTACKS
from services.http.h2.wire.frames import (
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    PRIORITY,
    SETTINGS,
    WINDOW_UPDATE,
    FrameReader,
)

KINDS = {
    "PING": {PING},
    "SETTINGS": {SETTINGS},
    "WINDOW_UPDATE": {WINDOW_UPDATE},
    "PRIORITY": {PRIORITY},
    "unknown frames": {0x42},
    "empty DATA": {HEADERS, DATA},
    "CONTINUATION": {HEADERS, CONTINUATION},
    "many fields": {HEADERS},
    "compressed body": {HEADERS, DATA},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_consists_of_whole_frames(name: str) -> None:
    reader, kinds = FrameReader(), set()
    data, size = ATTACKS[name](), 0
    reader.feed(data)
    while (one := reader.next()) is not None:
        kinds.add(one.kind)
        size += 9 + len(one.payload)

    assert size == len(data) > 0
    assert kinds == KINDS.get(name, kinds)
