"""Head: what HTTP demands of a response, though no HTTP library writes it."""

import time
from email.utils import parsedate_to_datetime

import pytest

from services.frontend.http.head import head_of, last_chunk


def fields_of(head: bytes) -> dict[str, str]:
    _, *lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    return {name.lower(): value for name, value in (line.split(": ") for line in lines)}


def test_names_the_request_and_the_hour() -> None:
    before = int(time.time())
    head = head_of("r-1", is_chunked=True, is_last=False)

    fields = fields_of(head)
    assert fields["x-request-id"] == "r-1"
    assert before <= parsedate_to_datetime(fields["date"]).timestamp() <= time.time()


@pytest.mark.parametrize(
    ("is_chunked", "is_last", "status", "encoding", "connection"),
    [
        (True, False, b"HTTP/1.1 200 OK", "chunked", None),
        (True, True, b"HTTP/1.1 200 OK", "chunked", "close"),
        (False, True, b"HTTP/1.0 200 OK", None, None),
    ],
)
def test_says_where_the_body_ends(
    is_chunked: bool, is_last: bool, status: bytes, encoding: str | None, connection: str | None
) -> None:
    head = head_of("r-1", is_chunked=is_chunked, is_last=is_last)

    assert head.startswith(status + b"\r\n")
    assert fields_of(head).get("transfer-encoding") == encoding
    assert fields_of(head).get("connection") == connection


def test_the_last_chunk_ends_the_body() -> None:
    assert last_chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"
