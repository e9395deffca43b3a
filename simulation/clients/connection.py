"""A connection of a client: the bytes that come, and the loss of it."""

import asyncio
from typing import Any

from simulation.clients.client import HUNG, PATIENCE_S
from simulation.plane import FRONTEND_PORT


class Connection(asyncio.Protocol):
    """Opened by `open_to`. `transport`: of the connection."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._arrivals: asyncio.Queue[bytes | str] = asyncio.Queue()
        self._connected = asyncio.Event()

    async def open_to(self, frontend: int) -> str:
        """Connect. Returns why that failed; empty: it did not."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await loop.create_connection(lambda: self, "127.0.0.1", FRONTEND_PORT + 2 * frontend)
                await self._connected.wait()
        except (OSError, TimeoutError) as error:
            return f"connect: {type(error).__name__}"
        return ""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._connected.set()

    def data_received(self, data: bytes) -> None:
        self._arrivals.put_nowait(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._arrivals.put_nowait("reset" if error else "closed")

    async def read(self) -> bytes | str:
        """What has come, or why nothing comes any more."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._arrivals.get()
        except TimeoutError:
            return HUNG
