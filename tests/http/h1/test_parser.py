"""Requests are parsed the same however their bytes are split; invalid bytes have a reason and end the parsing."""

import pytest

from services.core.errors import Failure, Reason
from services.http.h1.parser import (
    CHUNKS_MAX,
    HEAD_BYTES_MAX,
    HEADER_BYTES,
    PIPELINED_REQUESTS_MAX,
    RequestParser,
)
from services.http.server.context import BrokenHead
from services.http.server.messages import HttpRequest

BYTES_MAX = 100
POST = b"POST /v1/a%20b?x=1 HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 5\r\n\r\nhello"
SIZE = b"1;" + b"a" * 1000 + b"\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


def read(*pieces: bytes) -> RequestParser:
    parser = RequestParser(BYTES_MAX)
    for piece in pieces:
        assert parser.feed(piece)
    return parser


def last_of(data: bytes) -> HttpRequest:
    """The last request of bytes after which nothing can be parsed."""
    parser = RequestParser(BYTES_MAX)
    assert not parser.feed(data)
    return parser.requests[-1]


def broken_of(data: bytes) -> BrokenHead:
    parser = RequestParser(BYTES_MAX)
    assert not parser.feed(data)
    assert parser.broken is not None
    return parser.broken


def fault_of(data: bytes) -> Failure:
    fault = last_of(data).fault
    assert fault is not None
    return fault


@pytest.mark.parametrize("size", [1, 7, len(POST)])
def test_request_is_the_same_however_its_bytes_are_split(size: int) -> None:
    [request] = read(*(POST[start : start + size] for start in range(0, len(POST), size))).requests

    assert (request.method, request.path, request.body) == ("POST", "/v1/a b", b"hello")
    assert request.headers == {"host": "x", "x-one": "1, 2", "content-length": "5"}
    assert (request.fault, request.is_chunkable, request.keeps_alive) == (None, True, True)


def test_chunks_are_joined_to_one_body() -> None:
    [request] = read(CHUNKED).requests

    assert request.body == b"hello"


def test_pipelined_requests_come_in_order() -> None:
    assert [request.path for request in read(POST + CHUNKED + POST[:-1], POST[-1:]).requests] == [
        "/v1/a b",
        "/c",
        "/v1/a b",
    ]


@pytest.mark.parametrize(
    ("head", "is_chunkable", "keeps_alive"),
    [
        (b"GET / HTTP/1.1\r\n", True, True),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n", True, False),
        (b"GET / HTTP/1.0\r\n", False, False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", False, True),
    ],
)
def test_version_and_connection_header_decide_on_chunks_and_keep_alive(
    head: bytes, is_chunkable: bool, keeps_alive: bool
) -> None:
    [request] = read(head + b"\r\n").requests

    assert (request.is_chunkable, request.keeps_alive) == (is_chunkable, keeps_alive)


def test_upgrade_is_ignored() -> None:
    upgrade = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    assert [request.path for request in read(upgrade + CHUNKED).requests] == ["/live", "/c"]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("message", [POST, CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("header", [b"Connection: Upgrade\r\nUpgrade: h2c", b"X: 1"], ids=["h2c", "tunnel"])
def test_upgrade_with_a_body_is_a_request_with_that_body(header: bytes, message: bytes, size: int) -> None:
    """Java's client sends this by default. Bug: the body was parsed as a request of its own."""
    asked = message.replace(b"Host: x", header)
    if b"X: 1" in asked:
        asked = asked.replace(b"POST", b"CONNECT", 1)
    data = asked + POST

    upgraded, after = read(*(data[start : start + size] for start in range(0, len(data), size))).requests

    assert upgraded.body == after.body == b"hello"
    assert upgraded.method == asked.split()[0].decode()
    assert after.method == "POST"
    assert "host" not in upgraded.headers


def test_bounds_apply_after_an_upgrade() -> None:
    upgrade = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    many = RequestParser(BYTES_MAX)
    assert not many.feed(upgrade * (PIPELINED_REQUESTS_MAX + 5))

    assert (len(many.requests), many.broken) == (PIPELINED_REQUESTS_MAX, None)
    large = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1)
    assert fault_of(upgrade + large).reason is Reason.BODY_TOO_LARGE


def test_trailers_are_not_headers() -> None:
    """A proxy may have checked the headers alone."""
    trailers = b"0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n"
    [request] = read(CHUNKED.replace(b"0\r\n\r\n", trailers)).requests

    assert request.headers == {"host": "x", "transfer-encoding": "chunked"}
    assert request.body == b"hello"


def test_blanks_around_a_header_value_are_removed() -> None:
    [request] = read(b"GET / HTTP/1.1\r\nA: \t b c \t \r\n\r\n").requests

    assert request.headers == {"a": "b c"}


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://host:80/v1/a?x=/y", "/v1/a"),
        (b"http://host", "/"),
        (b"http://host?x", "/"),
        (b"/a://b/c", "/a://b/c"),
        (b"*", "*"),
        (b"/a%2Fb%00%ff", "/a/b\0\ufffd"),
    ],
)
def test_target_may_include_the_host(target: bytes, path: str) -> None:
    """Source: RFC 9112, section 3.2.2: a server must accept a target with a host."""
    method = b"OPTIONS" if target == b"*" else b"GET"

    [request] = read(method + b" " + target + b" HTTP/1.1\r\n\r\n").requests

    assert request.path == path


def test_expect_continue_is_reported_until_the_body_comes() -> None:
    head, body = POST.replace(b"Host: x", b"Expect: 100-continue"), b"hello"
    parser = read(head.removesuffix(body))
    assert parser.wants_continue

    assert parser.feed(body)
    assert not parser.wants_continue


def test_expect_continue_is_ignored_in_http_1_0() -> None:
    """Source: RFC 9110, section 10.1.1: a server must ignore Expect in HTTP/1.0."""
    assert not read(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n").wants_continue


def test_refused_request_is_not_to_be_continued() -> None:
    parser = RequestParser(BYTES_MAX)

    assert not parser.feed(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1))

    assert not parser.wants_continue


def test_requests_before_invalid_bytes_are_kept() -> None:
    parser = RequestParser(BYTES_MAX)

    assert not parser.feed(POST + b"no HTTP\r\n\r\n")

    assert [request.body for request in parser.requests] == [b"hello"]
    assert parser.broken is not None


def test_content_length_above_the_bound_is_refused_before_the_body_comes() -> None:
    fault = fault_of(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1))

    assert fault.reason is Reason.BODY_TOO_LARGE


def test_chunked_body_above_the_bound_is_refused() -> None:
    data = b"x" * (BYTES_MAX + 1)
    fault = fault_of(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))

    assert fault.reason is Reason.BODY_TOO_LARGE


def test_body_of_too_many_chunks_is_refused() -> None:
    """Bug: a client that sent chunks of one byte blocked all others for half a second, again and again."""
    head, chunk = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"
    parser = RequestParser(10 * CHUNKS_MAX)

    assert parser.feed(head + chunk * CHUNKS_MAX)
    assert not parser.feed(chunk)

    fault = parser.requests[0].fault
    assert fault is not None
    assert fault.reason is Reason.INVALID_ARGUMENT


def test_body_that_does_not_match_its_headers_is_a_fault_of_its_request() -> None:
    request = last_of(b"POST /v1/c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")

    assert (request.path, request.keeps_alive) == ("/v1/c", False)
    assert request.fault is not None
    assert request.fault.reason is Reason.INVALID_ARGUMENT


def test_request_that_is_broken_off_has_the_given_fault() -> None:
    parser = read(POST[:-2])
    assert parser.is_midway
    assert parser.has_head

    parser.break_off(Failure(Reason.DEADLINE_EXCEEDED, "too slow"))

    fault = parser.requests[0].fault
    assert fault is not None
    assert fault.reason is Reason.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nA" + b"a" * HEAD_BYTES_MAX + b": 1\r\n\r\n", 431),
        (b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET /\r\n\r\n", 505),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * (HEAD_BYTES_MAX // HEADER_BYTES), 431),
    ],
)
def test_invalid_and_ambiguous_requests_are_refused_with_their_status(data: bytes, status: int) -> None:
    assert broken_of(data).status == status


def test_bound_of_the_head_applies_across_reads() -> None:
    parser = read(b"GET / HTTP/1.1\r\nA: ")
    for _ in range(HEAD_BYTES_MAX // 1024):
        assert parser.feed(b"a" * 1024)

    assert not parser.feed(b"a" * 1024)

    assert parser.broken is not None
    assert parser.broken.status == 431


@pytest.mark.parametrize("rest", [b"0\r\nA: ", b"1;a="], ids=["trailer", "extension"])
def test_endless_line_after_the_head_is_refused(rest: bytes) -> None:
    """Bug: a trailer was buffered without a bound, in time quadratic in its length."""
    parser = read(CHUNKED.removesuffix(b"0\r\n\r\n") + rest)
    for _ in range(HEAD_BYTES_MAX // 1024):
        assert parser.feed(b"a" * 1024)

    assert not parser.feed(b"a" * 1024)


def test_read_with_the_end_of_a_head_may_bring_a_large_body() -> None:
    """Bug: such a request was refused for a large head."""
    body = b"x" * 2 * HEAD_BYTES_MAX
    parser = RequestParser(len(body))
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)

    assert parser.feed(head[:20])
    assert parser.feed(head[20:] + body)

    assert parser.requests[0].body == body


def test_long_chunk_extensions_are_accepted_if_body_comes_between_them() -> None:
    """Bytes without progress are counted only while no part of the body comes between them."""
    count = HEAD_BYTES_MAX // len(SIZE) + 1
    parser = RequestParser(count)
    parser.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    for _ in range(count):
        assert parser.feed(SIZE)
        assert parser.feed(b"x\r\n")
    assert parser.feed(b"0\r\n\r\n")

    assert parser.requests[0].body == b"x" * count


def test_last_request_of_too_many_in_one_read_closes_the_connection() -> None:
    parser = RequestParser(BYTES_MAX)

    assert not parser.feed(CHUNKED * (PIPELINED_REQUESTS_MAX + 5))

    assert len(parser.requests) == PIPELINED_REQUESTS_MAX
    assert [request.keeps_alive for request in parser.requests] == [True] * (PIPELINED_REQUESTS_MAX - 1) + [False]
