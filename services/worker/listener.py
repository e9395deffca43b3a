"""Where frontends come in: each connection is a session, in a task of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType

import structlog

from services.rpc.framing import FrameConnection
from services.runtime.listen import cannot_listen, listening_socket, split_listen
from services.stubs import worker_pb2

log = structlog.get_logger()

CLOSE_GRACE_S = 0.5
"""How long sessions that were told to end have for it, when the worker closes."""

Connection = FrameConnection[worker_pb2.FrontendMessage]


class SessionListener:
    """Listens from `start` on. An async context: leaving it ends all sessions."""

    def __init__(self, attach: Callable[[Connection], Awaitable[None]]) -> None:
        """attach: a session on the connection, to its end."""
        self._attach = attach
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_closing = False

    async def start(self, listen: str, *, option: str = "--session-listen") -> str:
        """Listen on `host:port` and return the real one. Raises StartupError if it can't be had.

        option: that which says where, for people.
        """
        host, _port = split_listen(listen)
        try:
            sock = listening_socket(listen)
        except OSError as error:
            raise cannot_listen("sessions", listen, error, option=option) from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_connection, sock=sock)
        return f"{host}:{sock.getsockname()[1]}"

    def _new_connection(self) -> Connection:
        return FrameConnection(worker_pb2.FrontendMessage, is_opener=False, on_connected=self._on_connected)

    def _on_connected(self, connection: Connection) -> None:
        if self._is_closing:
            connection.abort()  # It was on its way already.
            return
        task = self._group.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, connection))

    def _forget(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """The session is over, or was cancelled before it began."""
        self._tasks.discard(task)
        connection.close()

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._attach(connection)
        except Exception:  # A bug, and this frontend's streams go on elsewhere; those of the others stay.
            log.exception("bug in a session", peer=connection.peer)

    async def __aenter__(self) -> "SessionListener":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closing = True
        if self._server is not None:
            self._server.close()
        try:
            if self._tasks and error is None:
                await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)  # What happened outside it is not for it to wrap.
