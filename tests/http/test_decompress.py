"""Bodies are decompressed as their header says, within the bound, and completely or not at all."""

import gzip
import tracemalloc
import zlib
from functools import partial

import pytest

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason
from services.http.decompress import body_of
from services.http.server.messages import HttpRequest
from tests.support.doubles import run_async

BYTES_MAX = 1000
BOMB_BYTES = 100_000_000
gzipped = partial(gzip.compress, mtime=0)  # The result is a part of test ids, so it must not depend on the time.


def decompressed(body: bytes, encoding: str | None) -> bytes:
    async def test() -> bytes:
        headers = {} if encoding is None else {"content-encoding": encoding}
        request = HttpRequest(method="POST", path="/", headers=headers, body=body)
        return await body_of(request, BYTES_MAX, BoundedExecutor())

    return run_async(test())


def reason_of(body: bytes, encoding: str | None) -> Reason:
    with pytest.raises(Failure) as caught:
        decompressed(body, encoding)
    return caught.value.reason


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"{}", None),
        (b"{}", "identity"),
        (gzipped(b"{}"), "gzip"),
        (gzipped(b"{}"), "X-GZip"),
        (zlib.compress(b"{}"), "deflate"),
    ],
)
def test_body_is_decompressed_as_its_header_says(body: bytes, encoding: str | None) -> None:
    assert decompressed(body, encoding) == b"{}"


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"{}", "br"),
        (b"{}", "gzip"),
        (b"", "gzip"),
        (gzipped(b"{}")[:-1], "gzip"),
        (gzipped(b"{}") + gzipped(b"{}"), "gzip"),
        (zlib.compress(b"{}") + b"{}", "deflate"),
    ],
    ids=["unknown", "not packed", "empty", "cut", "two", "more"],
)
def test_body_that_cannot_be_decompressed_completely_is_refused(body: bytes, encoding: str) -> None:
    assert reason_of(body, encoding) is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("body", "encoding"), [(b"x" * (BYTES_MAX + 1), None), (gzipped(b"x" * (BYTES_MAX + 1)), "gzip")]
)
def test_bound_applies_to_the_decompressed_body(body: bytes, encoding: str | None) -> None:
    assert reason_of(body, encoding) is Reason.BODY_TOO_LARGE


def test_fault_of_the_request_is_raised_before_its_body_is_read() -> None:
    fault = Failure(Reason.DEADLINE_EXCEEDED, "the body did not arrive")
    request = HttpRequest(method="POST", path="/", headers={"content-encoding": "br"}, body=b"{", fault=fault)

    with pytest.raises(Failure) as caught:
        run_async(body_of(request, BYTES_MAX, BoundedExecutor()))

    assert caught.value is fault


def test_decompression_stops_at_the_bound() -> None:
    bomb = zlib.compress(bytes(BOMB_BYTES))
    tracemalloc.start()
    try:
        assert reason_of(bomb, "deflate") is Reason.BODY_TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES / 100
    finally:
        tracemalloc.stop()


def with_type(content_type: str, body: bytes) -> bytes:
    async def test() -> bytes:
        request = HttpRequest(method="POST", path="/", headers={"content-type": content_type}, body=body)
        return await body_of(request, BYTES_MAX, BoundedExecutor())

    return run_async(test())


@pytest.mark.parametrize(
    "content_type",
    [
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json",
        "application/json; charset=utf-8",
        'application/json;CHARSET="UTF8"',
        "application/json; charset=us-ascii",
        "text/plain; charset=ISO-8859-1",
    ],
)
def test_body_in_ascii_is_accepted_with_the_types_that_clients_send(content_type: str) -> None:
    assert with_type(content_type, b"{}") == b"{}"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json; charset=utf-16", b"{}"),
        ("application/json; charset=utf-32le", b"{}"),
        ("application/json; charset=iso-8859-1", "é".encode()),
        ("application/json; charset=made-up", b"{}"),
    ],
)
def test_body_in_another_charset_is_refused_by_its_name(content_type: str, body: bytes) -> None:
    with pytest.raises(Failure, match=r"the body's charset .* is not supported: send JSON in UTF-8") as caught:
        with_type(content_type, body)

    assert caught.value.reason is Reason.INVALID_ARGUMENT


def test_empty_content_encoding_is_none() -> None:
    assert decompressed(b"{}", "") == b"{}"
