"""What all connections of a server share."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest
from services.http.server.start_limiter import StartLimiter


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

    async def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        """Send the answer. Raises only CancelledError."""
        ...

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> bytes:
        """The response to bytes that are not a request. `headers`: those that could be read, by lower-case names."""
        ...

    def no_room(self, path: str, headers: Mapping[str, str]) -> bytes:
        """The response to a request for whose connection there is no room. `path`: "" if unknown."""
        ...

    def on_paused(self) -> None:
        """No connection is accepted for a while, because descriptors or memory have run out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ConnectionContext:
    """What all connections of a server share. `group`: of the tasks that answer. `cork`: of all streams."""

    app: App
    config: HttpConfig
    group: asyncio.TaskGroup
    cork: Cork
    clients: Clients
    start_limiter: StartLimiter = field(default_factory=StartLimiter)
