"""Header fields of requests are decoded and checked; those of answers are understood by any decoder."""

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from services.http.h2.wire.fields import (
    BLOCK_BYTES_KEPT,
    FieldDecoder,
    Fields,
    check_trailers,
    encode_fields,
    encode_status,
    head_of,
    literal,
)
from services.http.h2.wire.frames import ErrorCode, H2Error, StreamError
from services.http.h2.wire.header_block import BLOCK_BYTES_MAX

REQUEST: Fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/v1/a%20b?x=1"), (b":authority", b"h:1")]


def test_head_of_a_request() -> None:
    head = head_of([*REQUEST, (b"content-length", b"5"), (b"x-a", b"1"), (b"x-a", b"2")])

    assert (head.method, head.path, head.content_length) == ("POST", "/v1/a b", 5)
    assert head.headers == {"host": "h:1", "content-length": "5", "x-a": "1, 2"}


def test_crumbs_of_a_cookie_are_joined() -> None:
    assert head_of([*REQUEST, (b"cookie", b"a=1"), (b"cookie", b"b=2")]).headers["cookie"] == "a=1; b=2"


def test_authority_counts_before_the_host() -> None:
    assert head_of([*REQUEST, (b"host", b"other")]).headers["host"] == "h:1"


WITHOUT = {name: [(one, value) for one, value in REQUEST if one != name] for name, _ in REQUEST}


@pytest.mark.parametrize(
    "fields",
    [
        WITHOUT[b":method"],
        WITHOUT[b":scheme"],
        WITHOUT[b":path"],
        [*WITHOUT[b":path"], (b":path", b"")],
        [*WITHOUT[b":path"], (b":path", b"no-slash")],
        [*REQUEST, (b":method", b"GET")],
        [*REQUEST, (b":status", b"200")],
        [*REQUEST, (b":unknown", b"")],
        [(b"x", b"1"), *REQUEST],
        [*REQUEST, (b"X-Capital", b"1")],
        [*REQUEST, (b"", b"1")],
        [*REQUEST, (b"with space", b"1")],
        [*REQUEST, (b"connection", b"close")],
        [*REQUEST, (b"transfer-encoding", b"chunked")],
        [*REQUEST, (b"te", b"gzip")],
        [*REQUEST, (b"x", b"a\r\nb")],
        [*REQUEST, (b"x", b"a\0b")],
        [*REQUEST, (b"x", b" a")],
        [*REQUEST, (b"x", b"a\t")],
        [*REQUEST, (b"content-length", b"-1")],
        [*REQUEST, (b"content-length", b"1"), (b"content-length", b"1")],
        [*REQUEST, (b"content-length", b"9" * 20)],
    ],
)
def test_malformed_request_ends_its_stream(fields: Fields) -> None:
    with pytest.raises(StreamError) as raised:
        head_of(fields)

    assert raised.value.code is ErrorCode.PROTOCOL_ERROR


def test_te_trailers_is_allowed() -> None:
    assert head_of([*REQUEST, (b"te", b"trailers")]).headers["te"] == "trailers"


def test_trailers_have_no_pseudo_fields() -> None:
    check_trailers([(b"x-checksum", b"1")])
    with pytest.raises(StreamError):
        check_trailers([(b":path", b"/")])


@given(st.lists(st.tuples(st.sampled_from(["X-Request-Id", "date", "a" * 200]), st.text("ab%, é", max_size=400))))
def test_encoded_fields_are_decoded_to_the_same(fields: list[tuple[str, str]]) -> None:
    decoded = Decoder(max_header_list_size=1 << 24).decode(encode_fields(fields), raw=True)

    assert [(bytes(name), bytes(value)) for name, value in decoded] == [
        (name.lower().encode(), value.encode("latin-1")) for name, value in fields
    ]


@pytest.mark.parametrize("status", [200, 204, 304, 400, 404, 413, 499, 500, 503])
def test_status_is_decoded_to_the_same(status: int) -> None:
    [(name, value)] = FieldDecoder().decode(encode_status(status))

    assert (name, value) == (b":status", str(status).encode())


@pytest.mark.parametrize("size", [126, 127, 128, 127 + 127, 127 + 128, 127 + 2**14])
def test_lengths_at_the_borders_of_their_encoding(size: int) -> None:
    [(name, value)] = FieldDecoder().decode(literal(b"x", b"y" * size))

    assert (name, value) == (b"x", b"y" * size)


def test_blocks_share_a_table() -> None:
    encoder, decoder = Encoder(), FieldDecoder()

    blocks = [encoder.encode([("x-name", "value")]) for _ in range(2)]

    assert [decoder.decode(block) for block in blocks] == [[(b"x-name", b"value")]] * 2
    assert len(blocks[1]) == 1


def test_block_that_comes_again_is_not_decoded_again() -> None:
    decoder, block = FieldDecoder(), Encoder().encode([(name.decode(), value.decode()) for name, value in REQUEST[:2]])
    first = decoder.decode(block)

    assert decoder.decode(block) is first


@pytest.mark.parametrize("change", [literal(b"x", b"y" * BLOCK_BYTES_KEPT), b"\x40\x01x\x01y", b"\x20"])
def test_block_that_is_large_or_changes_the_table_is_decoded_again(change: bytes) -> None:
    """The last one sets the size of the table, which the first block does not."""
    decoder = FieldDecoder()
    decoder.decode(b"\x40\x01a\x011")
    first = decoder.decode(change)

    again = decoder.decode(change)

    assert again == first
    assert again is not first


def test_block_means_something_else_once_another_one_has_changed_the_table() -> None:
    decoder, newest, of_name = FieldDecoder(), b"\xbe", [b"\x40\x01%b\x011" % name for name in (b"a", b"b", b"a")]
    seen = []
    for block in of_name:
        decoder.decode(block)
        seen += [decoder.decode(newest), decoder.decode(newest)]

    assert seen == [[(name, b"1")] for name in (b"a", b"a", b"b", b"b", b"a", b"a")]


@given(st.lists(st.lists(st.sampled_from([("a", "1"), ("b", "2" * 30), ("c", "3" * 60)]), max_size=3), max_size=30))
def test_remembered_blocks_have_the_fields_that_any_decoder_finds(blocks: list[list[tuple[str, str]]]) -> None:
    """The table is so small that entries leave it again and again."""
    encoder, decoder = Encoder(), FieldDecoder()
    encoder.header_table_size = 150
    for fields in blocks:
        assert decoder.decode(encoder.encode(fields)) == [(name.encode(), value.encode()) for name, value in fields]


def test_heads_of_a_remembered_block_share_nothing() -> None:
    decoder = FieldDecoder()
    block = encode_fields([(name.decode(), value.decode()) for name, value in REQUEST])

    first, second = (decoder.head_of(decoder.decode(block)) for _ in range(2))

    assert first == second == head_of(REQUEST)
    assert first.headers is not second.headers


@pytest.mark.parametrize(
    ("block", "code"),
    [
        (b"\xff\xff\xff\xff\xff\xff", ErrorCode.COMPRESSION_ERROR),
        (b"\x80", ErrorCode.COMPRESSION_ERROR),
        (b"\x00\x05ab", ErrorCode.COMPRESSION_ERROR),
        (literal(b"x", b"y" * BLOCK_BYTES_MAX), ErrorCode.ENHANCE_YOUR_CALM),
    ],
)
def test_block_that_cannot_be_decoded_ends_the_connection(block: bytes, code: ErrorCode) -> None:
    with pytest.raises(H2Error) as raised:
        FieldDecoder().decode(block)

    assert raised.value.code is code


@given(st.binary(max_size=100))
def test_garbage_is_an_error_of_the_connection_and_nothing_else(block: bytes) -> None:
    try:
        fields = FieldDecoder().decode(block)
    except H2Error:
        return
    try:
        head_of(fields)
    except StreamError:
        return
