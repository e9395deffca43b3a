"""What all connections of a server share."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response
from services.http.server.turn_limits import FrameLimiter, StartLimiter


class BrokenHead(Exception):
    """The bytes are not a request, and later bytes cannot be parsed. `status`: of the response."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class App(Protocol):
    """The application that a server serves."""

    @property
    def body_bytes_max(self) -> int:
        """The largest request body, before decompression."""
        ...

    def on_head(self, request: HttpRequest) -> None:
        """The head of a request has come. Sets `refusal` if the request is to be answered without its body.

        May lower `body_bytes_max`.
        """
        ...

    async def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        """Send the answer. Raises only CancelledError."""
        ...

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> tuple[HttpRequest, Response]:
        """What takes the place of a request that could not be read, and the response to it.

        `headers`: those that could be read, by lower-case names.
        """
        ...

    def no_room(self, request: HttpRequest) -> Response:
        """The response to a request for whose connection there is no room. `path`: "" if unknown."""
        ...

    def closing(self, request: HttpRequest) -> Response:
        """The response to a request that has not begun when the server closes."""
        ...

    def on_paused(self) -> None:
        """No connection is accepted for a while, because descriptors or memory have run out."""
        ...


class Rpcs(Protocol):
    """The rpcs that a server serves over HTTP/2. The types are those of services/http/h2, which imports this module."""

    def open(self, host: Any, stream: Any, head: Any) -> Any:
        """An rpc has begun to arrive. Returns what takes its content."""
        ...

    def no_room(self) -> bytes:
        """The block of header fields that answers an rpc for whose connection there is no room."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConnectionContext:
    """What all connections of a server share. `group`: of the tasks that answer. `cork`: of all streams."""

    app: App
    config: HttpConfig
    group: asyncio.TaskGroup
    cork: Cork
    clients: Clients
    rpcs: Rpcs | None = None
    start_limiter: StartLimiter = field(default_factory=StartLimiter)
    frame_limiter: FrameLimiter = field(default_factory=FrameLimiter)
