"""Worlds without the product, for tests of what it runs on."""

import asyncio
from typing import Any

from simulation.runtime.transport import Server
from simulation.runtime.world import Process, World

PORT = 7_000


class Recorder(asyncio.Protocol):
    """Notes what happens to one end of a connection. `transport`: of the end."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.events.append(data)

    def eof_received(self) -> None:
        self.events.append("eof")

    def pause_writing(self) -> None:
        self.events.append("full")

    def resume_writing(self) -> None:
        self.events.append("room")

    def connection_lost(self, error: Exception | None) -> None:
        self.events.append(type(error).__name__ if error else "lost")

    @property
    def received(self) -> bytes:
        return b"".join(one for one in self.events if isinstance(one, bytes))


def world(seed: str = "test") -> World:
    return World(seed)


class Pair:
    """A client and a server in processes of their own, connected. `mine`, `theirs`: the ends."""

    def __init__(self, seed: str = "test") -> None:
        self.world = world(seed)
        self.mine, self.theirs = Recorder(), Recorder()
        self.server = self.world.spawn("server", self._serve)
        self.world.run(0.0)
        self.client = self.world.spawn("client", self._connect)
        self.run(0.01)

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now + seconds)

    async def _serve(self) -> None:
        listener = self.world.network.listen(self.server, ("127.0.0.1", PORT))
        server = Server(self.world.network, listener, lambda: self.theirs)
        await asyncio.Event().wait()
        server.close()

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self.mine, "127.0.0.1", PORT)
        await asyncio.Event().wait()

    def within(self, process: Process, action: Any) -> None:
        """Do something within a process, at once."""
        process.loop.call_soon(action)
        self.run(0.0)
