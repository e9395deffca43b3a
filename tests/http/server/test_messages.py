"""Responses, whole or streamed, have the headers and the framing that HTTP requires."""

import time
from email.utils import parsedate_to_datetime

import pytest

from services.http.server.messages import HttpRequest, Response, chunk, last_chunk, stream_fields, stream_head


def fields_of(head: bytes) -> dict[str, str]:
    _, *lines = head.decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    return {name.lower(): value for name, value in (line.split(": ") for line in lines)}


def request(method: str = "GET", *, is_chunkable: bool = True) -> HttpRequest:
    return HttpRequest(method=method, path="/", headers={}, is_chunkable=is_chunkable, id="r-1")


def test_stream_head_has_its_type_the_date_and_further_fields() -> None:
    before = int(time.time())
    head = stream_head(stream_fields("text/x", {"X-Request-Id": "r-1"}), is_chunked=True, is_last=False)

    fields = fields_of(head)
    assert (fields["content-type"], fields["x-request-id"]) == ("text/x", "r-1")
    assert before <= parsedate_to_datetime(fields["date"]).timestamp() <= time.time()


@pytest.mark.parametrize(
    ("is_chunked", "is_last", "status", "encoding", "connection"),
    [
        (True, False, b"HTTP/1.1 200 OK", "chunked", None),
        (True, True, b"HTTP/1.1 200 OK", "chunked", "close"),
        (False, True, b"HTTP/1.0 200 OK", None, None),
    ],
)
def test_stream_head_says_how_the_body_ends(
    is_chunked: bool, is_last: bool, status: bytes, encoding: str | None, connection: str | None
) -> None:
    head = stream_head(stream_fields("text/x", {}), is_chunked=is_chunked, is_last=is_last)

    assert head.startswith(status + b"\r\n")
    assert fields_of(head).get("transfer-encoding") == encoding
    assert fields_of(head).get("connection") == connection


def test_chunk_has_its_length_in_front() -> None:
    assert chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n"


def test_last_chunk_ends_the_body() -> None:
    assert last_chunk(b"x" * 17) == b"11\r\n" + b"x" * 17 + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("is_chunkable", "is_last", "connection"),
    [(True, False, None), (True, True, "close"), (False, False, "keep-alive"), (False, True, "close")],
)
def test_response_has_its_own_headers_and_its_length(is_chunkable: bool, is_last: bool, connection: str | None) -> None:
    response = Response(b"{}", 503, {"Retry-After": "2", "Content-Type": "application/json"})

    encoded = response.encode(request(is_chunkable=is_chunkable), is_last=is_last)

    head, _, body = encoded.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    fields = fields_of(head)
    assert (fields["retry-after"], fields["content-type"]) == ("2", "application/json")
    assert (fields["content-length"], fields["x-request-id"], fields.get("connection")) == ("2", "r-1", connection)
    assert body == b"{}"


def test_response_to_head_has_the_length_of_the_body_but_no_body() -> None:
    encoded = Response(b"body").encode(request("HEAD"), is_last=False)

    assert encoded.endswith(b"\r\n\r\n")
    assert fields_of(encoded)["content-length"] == "4"


def test_response_without_content_has_no_length() -> None:
    encoded = Response(b"", 204).encode(request(), is_last=False)

    assert encoded.startswith(b"HTTP/1.1 204 No Content\r\n")
    assert "content-length" not in fields_of(encoded)


def test_unknown_status_has_an_empty_phrase() -> None:
    assert Response(b"", 499).encode(request(), is_last=False).startswith(b"HTTP/1.1 499 \r\n")
