"""Reading: requests come out as they went in, however they are cut; what is broken says how, and ends the reading."""

import pytest

from services.core.errors import Failure, Reason
from services.http.server.messages import HttpRequest
from services.http.server.parser import (
    CHUNKS_MAX,
    HEAD_BYTES_MAX,
    HEADER_BYTES,
    REQUESTS_AHEAD_MAX,
    BrokenHead,
    RequestParser,
)

BYTES_MAX = 100
POST = b"POST /v1/a%20b?x=1 HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 5\r\n\r\nhello"
SIZE = b"1;" + b"a" * 1000 + b"\r\n"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


def read(*pieces: bytes) -> RequestParser:
    reader = RequestParser(BYTES_MAX)
    for piece in pieces:
        assert reader.feed(piece)
    return reader


def last_of(data: bytes) -> HttpRequest:
    """Of what can be read no further."""
    reader = RequestParser(BYTES_MAX)
    assert not reader.feed(data)
    return reader.requests[-1]


def broken_of(data: bytes) -> BrokenHead:
    reader = RequestParser(BYTES_MAX)
    assert not reader.feed(data)
    assert reader.broken is not None
    return reader.broken


def fault_of(data: bytes) -> Failure:
    fault = last_of(data).fault
    assert fault is not None
    return fault


@pytest.mark.parametrize("size", [1, 7, len(POST)])
def test_a_request_is_the_same_however_it_is_cut(size: int) -> None:
    [request] = read(*(POST[start : start + size] for start in range(0, len(POST), size))).requests

    assert (request.method, request.path, request.body) == ("POST", "/v1/a b", b"hello")
    assert request.headers == {"host": "x", "x-one": "1, 2", "content-length": "5"}
    assert (request.fault, request.is_chunkable, request.keeps_alive) == (None, True, True)


def test_chunks_are_one_body() -> None:
    [request] = read(CHUNKED).requests

    assert request.body == b"hello"


def test_requests_behind_each_other_come_in_order() -> None:
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
def test_the_version_and_the_headers_say_what_the_client_takes(
    head: bytes, is_chunkable: bool, keeps_alive: bool
) -> None:
    [request] = read(head + b"\r\n").requests

    assert (request.is_chunkable, request.keeps_alive) == (is_chunkable, keeps_alive)


def test_who_wants_another_protocol_is_answered_in_this_one() -> None:
    upgrade = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    assert [request.path for request in read(upgrade + CHUNKED).requests] == ["/live", "/c"]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("message", [POST, CHUNKED], ids=["length", "chunks"])
@pytest.mark.parametrize("wish", [b"Connection: Upgrade\r\nUpgrade: h2c", b"X: 1"], ids=["h2c", "tunnel"])
def test_who_wants_another_protocol_and_sends_a_body_is_asking_what_the_body_says(
    wish: bytes, message: bytes, size: int
) -> None:
    """As Java's client does unless told otherwise. The body was taken for a request of its own."""
    asked = message.replace(b"Host: x", wish)
    if b"X: 1" in asked:
        asked = asked.replace(b"POST", b"CONNECT", 1)
    data = asked + POST

    upgraded, after = read(*(data[start : start + size] for start in range(0, len(data), size))).requests

    assert upgraded.body == after.body == b"hello"
    assert upgraded.method == asked.split()[0].decode()
    assert after.method == "POST"
    assert "host" not in upgraded.headers


def test_what_follows_a_wish_for_another_protocol_has_its_bounds() -> None:
    upgrade = b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

    many = RequestParser(BYTES_MAX)
    assert not many.feed(upgrade * (REQUESTS_AHEAD_MAX + 5))

    assert (len(many.requests), many.broken) == (REQUESTS_AHEAD_MAX, None)
    large = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1)
    assert fault_of(upgrade + large).reason is Reason.BODY_TOO_LARGE


def test_trailers_are_no_headers() -> None:
    """Whoever stands before us may have looked at headers alone."""
    trailers = b"0\r\nAuthorization: Bearer x\r\nHost: y\r\n\r\n"
    [request] = read(CHUNKED.replace(b"0\r\n\r\n", trailers)).requests

    assert request.headers == {"host": "x", "transfer-encoding": "chunked"}
    assert request.body == b"hello"


def test_blanks_around_a_value_are_no_part_of_it() -> None:
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
def test_a_target_may_name_the_host(target: bytes, path: str) -> None:
    """Source: RFC 9112, section 3.2.2: a server must accept that."""
    method = b"OPTIONS" if target == b"*" else b"GET"

    [request] = read(method + b" " + target + b" HTTP/1.1\r\n\r\n").requests

    assert request.path == path


def test_who_waits_for_leave_to_send_a_body_is_seen() -> None:
    head, body = POST.replace(b"Host: x", b"Expect: 100-continue"), b"hello"
    reader = read(head.removesuffix(body))
    assert reader.wants_continue

    assert reader.feed(body)
    assert not reader.wants_continue


def test_nobody_waits_for_leave_in_http_1_0() -> None:
    """Source: RFC 9110, section 10.1.1: a server must ignore it there."""
    assert not read(b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n").wants_continue


def test_who_is_refused_is_given_no_leave() -> None:
    reader = RequestParser(BYTES_MAX)

    assert not reader.feed(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1))

    assert not reader.wants_continue


def test_what_is_no_request_does_not_undo_those_before_it() -> None:
    reader = RequestParser(BYTES_MAX)

    assert not reader.feed(POST + b"no HTTP\r\n\r\n")

    assert [request.body for request in reader.requests] == [b"hello"]
    assert reader.broken is not None


def test_a_body_that_is_named_too_large_is_refused_before_it_comes() -> None:
    fault = fault_of(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1))

    assert fault.reason is Reason.BODY_TOO_LARGE


def test_chunks_are_refused_once_they_are_too_large() -> None:
    data = b"x" * (BYTES_MAX + 1)
    fault = fault_of(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))

    assert fault.reason is Reason.BODY_TOO_LARGE


def test_a_body_in_very_many_chunks_is_refused() -> None:
    """One client that sent chunks of a byte held up all others for half a second, again and again."""
    head, chunk = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"
    reader = RequestParser(10 * CHUNKS_MAX)

    assert reader.feed(head + chunk * CHUNKS_MAX)
    assert not reader.feed(chunk)

    fault = reader.requests[0].fault
    assert fault is not None
    assert fault.reason is Reason.INVALID_ARGUMENT


def test_a_body_that_is_not_as_its_headers_say_is_a_fault_of_its_request() -> None:
    request = last_of(b"POST /v1/c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")

    assert (request.path, request.keeps_alive) == ("/v1/c", False)
    assert request.fault is not None
    assert request.fault.reason is Reason.INVALID_ARGUMENT


def test_a_request_that_is_broken_off_has_what_it_is_broken_off_for() -> None:
    reader = read(POST[:-2])
    assert reader.is_midway
    assert reader.has_head

    reader.break_off(Failure(Reason.DEADLINE_EXCEEDED, "too slow"))

    fault = reader.requests[0].fault
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
def test_what_is_no_request_or_could_be_two_is_none(data: bytes, status: int) -> None:
    assert broken_of(data).status == status


def test_a_head_in_pieces_has_the_same_bound() -> None:
    reader = read(b"GET / HTTP/1.1\r\nA: ")
    for _ in range(HEAD_BYTES_MAX // 1024):
        assert reader.feed(b"a" * 1024)

    assert not reader.feed(b"a" * 1024)

    assert reader.broken is not None
    assert reader.broken.status == 431


@pytest.mark.parametrize("rest", [b"0\r\nA: ", b"1;a="], ids=["trailer", "extension"])
def test_a_line_after_the_head_that_does_not_end_has_that_bound_too(rest: bytes) -> None:
    """The parser kept all of a trailer, in a time that grew with the square of its length."""
    reader = read(CHUNKED.removesuffix(b"0\r\n\r\n") + rest)
    for _ in range(HEAD_BYTES_MAX // 1024):
        assert reader.feed(b"a" * 1024)

    assert not reader.feed(b"a" * 1024)


def test_a_head_in_pieces_may_end_in_a_read_that_brings_a_large_body() -> None:
    """It was taken for a head that is too large."""
    body = b"x" * 2 * HEAD_BYTES_MAX
    reader = RequestParser(len(body))
    head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)

    assert reader.feed(head[:20])
    assert reader.feed(head[20:] + body)

    assert reader.requests[0].body == body


def test_chunks_may_come_apart_from_their_sizes() -> None:
    """Reads that bring none of the body count only together, without one between them that does."""
    count = HEAD_BYTES_MAX // len(SIZE) + 1
    reader = RequestParser(count)
    reader.feed(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")

    for _ in range(count):
        assert reader.feed(SIZE)
        assert reader.feed(b"x\r\n")
    assert reader.feed(b"0\r\n\r\n")

    assert reader.requests[0].body == b"x" * count


def test_of_very_many_requests_in_one_read_the_last_that_is_taken_is_the_last_of_all() -> None:
    reader = RequestParser(BYTES_MAX)

    assert not reader.feed(CHUNKED * (REQUESTS_AHEAD_MAX + 5))

    assert len(reader.requests) == REQUESTS_AHEAD_MAX
    assert [request.keeps_alive for request in reader.requests] == [True] * (REQUESTS_AHEAD_MAX - 1) + [False]
