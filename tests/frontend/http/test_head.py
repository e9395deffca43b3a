"""Head: what HTTP demands of a response, though no HTTP library writes it."""

import time
from email.utils import parsedate_to_datetime

import pytest
from aiohttp import web

from services.frontend.http.head import head_of, last_chunk, whole


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


@pytest.mark.parametrize(("is_last", "connection"), [(False, None), (True, "close")])
def test_a_whole_response_has_its_own_fields_and_its_length(is_last: bool, connection: str | None) -> None:
    response = web.Response(status=503, body=b"{}", headers={"Retry-After": "2", "Content-Type": "application/json"})

    head, _, body = whole(response, "r-1", is_last=is_last).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    fields = fields_of(head)
    assert (fields["retry-after"], fields["content-type"]) == ("2", "application/json")
    assert (fields["content-length"], fields["x-request-id"], fields.get("connection")) == ("2", "r-1", connection)
    assert body == b"{}"
