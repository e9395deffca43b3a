"""Clients of gRPC-Web over both versions of HTTP, which read an answer as a page does."""

import base64
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.http.h2.wire.frames import DATA, END_STREAM, FRAME_BYTES_MAX, frame
from tests.http.grpc.support import Serving, message, raw_client

BINARY = {"content-type": "application/grpc-web+proto", "x-grpc-web": "1"}
TEXT = {"content-type": "application/grpc-web-text"}
VERSIONS = ("HTTP/1.1", "HTTP/2")


@dataclass
class WebAnswer:
    """An answer. `messages`: with their flags. `trailers`: None: the answer was cut."""

    status: int
    headers: dict[str, str]
    body: bytes
    messages: list[tuple[int, bytes]]
    trailers: dict[str, str] | None

    @property
    def code(self) -> int:
        assert self.trailers is not None
        return int(self.trailers["grpc-status"])


async def ask(
    serving: Serving, version: str, path: str, body: bytes, headers: dict[str, str], method: str = "POST"
) -> WebAnswer:
    """Send one request and read its answer to the end."""
    asked = _over_http1 if version == "HTTP/1.1" else _over_http2
    status, received, content = await asked(serving, path, body, headers, method)
    return answer_of(status, {name.lower(): value for name, value in received.items()}, content)


async def _over_http1(serving: Serving, path: str, body: bytes, headers: dict[str, str], method: str) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{serving.address}{path}", data=body, headers=headers) as response,
    ):
        return response.status, dict(response.headers), await response.read()


async def _over_http2(serving: Serving, path: str, body: bytes, headers: dict[str, str], method: str) -> Any:
    async with raw_client(serving) as client:
        stream_id = client.open(path, headers, method, ends=False)
        pieces = [body[at : at + FRAME_BYTES_MAX] for at in range(0, len(body), FRAME_BYTES_MAX)]
        client.send(*(frame(DATA, 0, stream_id, piece) for piece in pieces), frame(DATA, END_STREAM, stream_id))
        answer = await client.answer(stream_id)
        assert answer.trailers == {}, "gRPC-Web has no trailers of HTTP"
        return answer.status, answer.headers, answer.body


def answer_of(status: int, headers: dict[str, str], body: bytes) -> WebAnswer:
    """Take an answer apart."""
    if not headers.get("content-type", "").startswith("application/grpc-web"):
        return WebAnswer(status, headers, body, [], None)
    data = plain(body) if "-text" in headers["content-type"] else body
    messages, trailers = [], None
    while data:
        assert trailers is None, "the status is the last message"
        flag, size = data[0], int.from_bytes(data[1:5], "big")
        content, data = data[5 : 5 + size], data[5 + size :]
        assert len(content) == size
        if flag & 0x80:
            lines = content.decode("ascii").removesuffix("\r\n").split("\r\n")
            trailers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        else:
            messages.append((flag, content))
    return WebAnswer(status, headers, body, messages, trailers)


def plain(text: bytes) -> bytes:
    """Decode base64 four characters at a time, so that padding may be anywhere."""
    assert len(text) % 4 == 0
    return b"".join(base64.b64decode(text[at : at + 4], validate=True) for at in range(0, len(text), 4))


def encoded(serving: Serving, name: str, **fields: Any) -> bytes:
    """A message with its prefix."""
    content: bytes = serving.service.types[name](**fields).SerializeToString()
    return message(content)
