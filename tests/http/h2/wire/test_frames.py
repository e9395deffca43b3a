"""Frames are read as they were written, however their bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.http.h2.wire.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_BYTES_MAX,
    HEADERS,
    PADDED,
    PRIORITISED,
    PRIORITY,
    ErrorCode,
    Frame,
    FrameReader,
    H2Error,
    frame,
    headers_frames,
    unpadded,
)


def read_all(reader: FrameReader) -> list[Frame]:
    frames = []
    while (one := reader.next()) is not None:
        frames.append(one)
    return frames


@given(st.lists(st.binary(max_size=30), max_size=5), st.lists(st.integers(0, 200), max_size=6))
def test_frames_are_the_same_however_their_bytes_arrive(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(frame(DATA, 1, 3, payload) for payload in payloads)
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader, frames = FrameReader(), []

    for start, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
        reader.feed(data[start:end])
        frames += read_all(reader)

    assert frames == [Frame(DATA, 1, 3, payload) for payload in payloads]


def test_frame_above_the_bound_is_an_error_before_it_has_come() -> None:
    reader = FrameReader()
    reader.feed(frame(DATA, 0, 1, bytes(FRAME_BYTES_MAX + 1))[:9])

    with pytest.raises(H2Error) as raised:
        reader.next()

    assert raised.value.code is ErrorCode.FRAME_SIZE_ERROR


def test_reserved_bit_of_a_stream_id_is_ignored() -> None:
    reader = FrameReader()
    reader.feed(frame(DATA, 0, 1 << 31 | 5))

    assert read_all(reader) == [Frame(DATA, 0, 5, b"")]


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 3 * FRAME_BYTES_MAX + 1])
def test_large_block_of_fields_continues_in_further_frames(size: int) -> None:
    reader = FrameReader()
    reader.feed(headers_frames(7, b"x" * size, is_last=True))

    first, *others = read_all(reader)

    assert (first.kind, first.flags & END_STREAM) == (HEADERS, END_STREAM)
    assert {one.kind for one in others} <= {CONTINUATION}
    assert [bool(one.flags & END_HEADERS) for one in (first, *others)] == [False] * len(others) + [True]
    assert b"".join(one.payload for one in (first, *others)) == b"x" * size


@pytest.mark.parametrize(
    ("kind", "flags", "payload", "content"),
    [
        (DATA, 0, b"content", b"content"),
        (DATA, PADDED, b"\x03content\0\0\0", b"content"),
        (DATA, PADDED, b"\x00content", b"content"),
        (HEADERS, PRIORITISED, b"\0\0\0\x09\x10fields", b"fields"),
        (HEADERS, PRIORITISED | PADDED, b"\x02\0\0\0\x09\x10fields\0\0", b"fields"),
        (DATA, PRIORITISED, b"\0\0\0\x09\x10", b"\0\0\0\x09\x10"),
    ],
)
def test_padding_and_priority_are_left_out(kind: int, flags: int, payload: bytes, content: bytes) -> None:
    assert unpadded(Frame(kind, flags, 1, payload)) == content


@pytest.mark.parametrize(
    ("kind", "flags", "payload", "code"),
    [
        (DATA, PADDED, b"", ErrorCode.FRAME_SIZE_ERROR),
        (DATA, PADDED, b"\x03ab", ErrorCode.PROTOCOL_ERROR),
        (HEADERS, PRIORITISED, b"\0\0\0\0", ErrorCode.FRAME_SIZE_ERROR),
        (HEADERS, PRIORITISED | PADDED, b"\x01\0\0\0\0\0", ErrorCode.PROTOCOL_ERROR),
    ],
)
def test_padding_that_does_not_fit_is_an_error(kind: int, flags: int, payload: bytes, code: ErrorCode) -> None:
    with pytest.raises(H2Error) as raised:
        unpadded(Frame(kind, flags, 1, payload))

    assert raised.value.code in {code, ErrorCode.FRAME_SIZE_ERROR}


@pytest.mark.parametrize(
    ("one", "depends"),
    [
        (Frame(PRIORITY, 0, 5, b"\0\0\0\x05\x10"), True),
        (Frame(PRIORITY, 0, 5, b"\x80\0\0\x05\x10"), True),
        (Frame(PRIORITY, 0, 5, b"\0\0\0\x03\x10"), False),
        (Frame(HEADERS, PRIORITISED, 5, b"\0\0\0\x05\x10"), True),
        (Frame(HEADERS, PRIORITISED | PADDED, 5, b"\0\0\0\0\x05\x10"), True),
        (Frame(HEADERS, 0, 5, b"\0\0\0\x05\x10"), False),
    ],
)
def test_stream_that_depends_on_itself_is_noticed(one: Frame, *, depends: bool) -> None:
    assert one.depends_on_itself is depends
