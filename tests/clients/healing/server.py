"""A plane that answers each request with the next take of a script, for clients of both kinds."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import httpx

from unbroken_client import RetryPolicy, async_httpx_client, httpx_client

URLS = ("http://first:8000", "http://second:8000/v1")
PATH = "/v1/chat/completions"
ID = "0123456789abcdef0123456789abcdef"
KEPT = {"content-type": "text/event-stream", "x-unbroken-generation-id": ID, "x-unbroken-seed": "77"}
DONE = "data: [DONE]\n\n"
AT_ONCE = RetryPolicy(base_s=0.0)

Take = httpx.Response | Exception


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Pieces of a body. An exception among them breaks the connection there."""

    def __init__(self, pieces: Sequence[bytes | Exception]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def event(text: str, cursor: str | None = None, **fields: Any) -> str:
    """An event with one piece of text. `cursor`: its id. `fields`: of the choice."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, **fields}
    head = "" if cursor is None else f"id: {cursor}\n"
    return f"{head}data: {json.dumps({'choices': [choice]})}\n\n"


def stream(*pieces: str | bytes | Exception, headers: dict[str, str] = KEPT) -> httpx.Response:
    """A stream of events, in these pieces."""
    body = Body([piece.encode() if isinstance(piece, str) else piece for piece in pieces])
    return httpx.Response(200, headers=headers, stream=body)


def failed(status: int, code: str, *, retryable: bool, **headers: str) -> httpx.Response:
    """A failure, with an error envelope."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, json={"error": {"code": code, "retryable": retryable}})


def failure(code: str, *, retryable: bool) -> str:
    """A failure in a stream."""
    return f"event: error\ndata: {json.dumps({'error': {'code': code, 'retryable': retryable}})}\n\n"


class Plane:
    """`takes`: in the order of the requests, which are kept in `requests`; those that cancel are in `cancels`."""

    def __init__(self, *takes: Take) -> None:
        self._takes = list(takes)
        self.requests: list[httpx.Request] = []
        self.cancels: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/cancel"):
            self.cancels.append(request)
            return httpx.Response(200)
        self.requests.append(request)
        take = self._takes.pop(0)
        if isinstance(take, Exception):
            raise take
        return take

    @property
    def asked(self) -> list[str]:
        """The method, the server and the path of each request."""
        return [f"{one.method} {one.url.host} {one.url.path}" for one in self.requests]


class Answered:
    """What a user has got. `error`: with which the body has ended."""

    def __init__(self, status: int, headers: httpx.Headers, text: str, error: Exception | None) -> None:
        self.status = status
        self.headers = headers
        self.text = text
        self.error = error


def ask_sync(plane: Plane, body: dict[str, Any], headers: dict[str, str], policy: RetryPolicy, reads: int) -> Answered:
    pieces, error = [], None
    with (
        httpx_client(URLS, policy=policy, transport=httpx.MockTransport(plane)) as client,
        client.stream("POST", URLS[0] + PATH, json=body, headers=headers) as response,
    ):
        try:
            for piece in response.iter_bytes():
                pieces.append(piece)
                if len(pieces) == reads:
                    break
        except httpx.TransportError as lost:
            error = lost
    return Answered(response.status_code, response.headers, b"".join(pieces).decode(), error)


def ask_async(plane: Plane, body: dict[str, Any], headers: dict[str, str], policy: RetryPolicy, reads: int) -> Answered:
    async def ask() -> Answered:
        pieces, error = [], None
        async with (
            async_httpx_client(URLS, policy=policy, transport=httpx.MockTransport(plane)) as client,
            client.stream("POST", URLS[0] + PATH, json=body, headers=headers) as response,
        ):
            try:
                async for piece in response.aiter_bytes():
                    pieces.append(piece)
                    if len(pieces) == reads:
                        break
            except httpx.TransportError as lost:
                error = lost
        return Answered(response.status_code, response.headers, b"".join(pieces).decode(), error)

    return asyncio.run(ask())
