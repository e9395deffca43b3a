"""The body: unpacked as its header says, never beyond the bound, and never a part in place of the whole."""

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
gzipped = partial(gzip.compress, mtime=0)  # Names of tests are made of what it returns.


def unpacked(body: bytes, encoding: str | None) -> bytes:
    async def test() -> bytes:
        headers = {} if encoding is None else {"content-encoding": encoding}
        request = HttpRequest(method="POST", path="/", headers=headers, body=body)
        return await body_of(request, BYTES_MAX, BoundedExecutor())

    return run_async(test())


def reason_of(body: bytes, encoding: str | None) -> Reason:
    with pytest.raises(Failure) as caught:
        unpacked(body, encoding)
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
def test_a_body_is_unpacked_as_its_header_says(body: bytes, encoding: str | None) -> None:
    assert unpacked(body, encoding) == b"{}"


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
def test_what_can_not_be_unpacked_as_a_whole_is_refused(body: bytes, encoding: str) -> None:
    assert reason_of(body, encoding) is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("body", "encoding"), [(b"x" * (BYTES_MAX + 1), None), (gzipped(b"x" * (BYTES_MAX + 1)), "gzip")]
)
def test_the_bound_is_that_of_the_unpacked_body(body: bytes, encoding: str | None) -> None:
    assert reason_of(body, encoding) is Reason.BODY_TOO_LARGE


def test_a_body_that_unpacks_to_very_much_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(BOMB_BYTES))
    tracemalloc.start()
    try:
        assert reason_of(bomb, "deflate") is Reason.BODY_TOO_LARGE
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES / 100
    finally:
        tracemalloc.stop()
