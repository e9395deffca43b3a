"""Reading: requests come out as they went in, however they are cut; what is broken says how, and ends the reading."""

import pytest

from services.errors import Failure, Reason
from services.frontend.http.messages import HttpRequest
from services.frontend.http.reading import HEAD_BYTES_MAX, REQUESTS_AHEAD_MAX, BrokenHead, RequestReader

BYTES_MAX = 100
POST = b"POST /v1/a%20b?x=1 HTTP/1.1\r\nHost: x\r\nX-One: 1\r\nx-one: 2\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"


def read(*pieces: bytes) -> RequestReader:
    reader = RequestReader(BYTES_MAX)
    for piece in pieces:
        assert reader.feed(piece)
    return reader


def last_of(data: bytes) -> HttpRequest:
    """Of what can be read no further."""
    reader = RequestReader(BYTES_MAX)
    assert not reader.feed(data)
    return reader.requests[-1]


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


def test_who_waits_for_leave_to_send_a_body_is_seen() -> None:
    head, body = POST.replace(b"Host: x", b"Expect: 100-continue"), b"hello"
    reader = read(head.removesuffix(body))
    assert reader.wants_continue

    assert reader.feed(body)
    assert not reader.wants_continue


def test_a_body_that_is_named_too_large_is_refused_before_it_comes() -> None:
    fault = fault_of(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (BYTES_MAX + 1))

    assert fault.reason is Reason.BODY_TOO_LARGE


def test_chunks_are_refused_once_they_are_too_large() -> None:
    data = b"x" * (BYTES_MAX + 1)
    fault = fault_of(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(data), data))

    assert fault.reason is Reason.BODY_TOO_LARGE


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
    ],
)
def test_what_is_no_request_or_could_be_two_is_none(data: bytes, status: int) -> None:
    reader = RequestReader(BYTES_MAX)
    with pytest.raises(BrokenHead) as caught:
        reader.feed(data)

    assert caught.value.status == status


def test_a_head_in_pieces_has_the_same_bound() -> None:
    reader = read(b"GET / HTTP/1.1\r\nA: ")
    for _ in range(HEAD_BYTES_MAX // 1024):
        reader.feed(b"a" * 1024)
    with pytest.raises(BrokenHead) as caught:
        reader.feed(b"a" * 1024)

    assert caught.value.status == 431


def test_of_very_many_requests_in_one_read_the_last_that_is_taken_is_the_last_of_all() -> None:
    reader = RequestReader(BYTES_MAX)

    assert not reader.feed(CHUNKED * (REQUESTS_AHEAD_MAX + 5))

    assert len(reader.requests) == REQUESTS_AHEAD_MAX
    assert [request.keeps_alive for request in reader.requests] == [True] * (REQUESTS_AHEAD_MAX - 1) + [False]
