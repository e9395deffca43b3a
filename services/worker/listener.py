"""Accepts the connections of frontends. Each is a session in a task of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType

import structlog

from services.rpc.framing import FrameConnection
from services.rpc.secure.sessions import SecureSessions
from services.runtime.descriptors.limit import is_reserved
from services.runtime.listen import cannot_listen, listening_socket, split_listen
from services.runtime.log_throttle import LogThrottle
from services.stubs import worker_pb2
from services.tls.connection import TlsConnection
from services.tls.explain import is_departure, why_failed
from services.tls.peers import Peers
from services.tls.roles import SESSIONS

log = structlog.get_logger()

CLOSE_GRACE_S = 0.5
"""How long sessions may take to end when the worker closes."""

Connection = FrameConnection[worker_pb2.FrontendMessage]


class SessionListener:
    """Listens from `start` on. As an async context manager it ends all sessions on exit."""

    def __init__(self, attach: Callable[[Connection], Awaitable[None]], peers: Peers | None = None) -> None:
        """`attach`: serves a session on a connection and returns at its end. `peers`: serve over TLS; None: without."""
        self._attach = attach
        self._secure = None if peers is None else SecureSessions(peers, SESSIONS)
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_closing = False
        self._throttle = LogThrottle()

    async def start(self, listen: str, *, option: str = "--session-listen") -> str:
        """Listen on `host:port` and return the actual address. Raises StartupError if that fails.

        `option`: the option that sets the address, for the error message.
        """
        host, _port = split_listen(listen)
        try:
            sock = listening_socket(listen)
        except OSError as error:
            raise cannot_listen("sessions", listen, error, option=option) from error
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_connection, sock=sock)
        return f"{host}:{sock.getsockname()[1]}"

    def _new_connection(self) -> asyncio.Protocol:
        connection = FrameConnection(worker_pb2.FrontendMessage, is_opener=False, on_connected=self._on_connected)
        return connection if self._secure is None else self._secure.wrap(connection, self._on_failed)

    def _on_failed(self, connection: TlsConnection, error: Exception) -> None:
        """A handshake failed, or the peer may not open a session."""
        if is_departure(error):
            return
        report = log.warning if self._throttle.should_log() else log.debug
        report("a session was refused", peer=connection.peer, why=why_failed(error))

    def _on_connected(self, connection: Connection) -> None:
        if self._is_closing:
            connection.abort()  # It was accepted before the server closed.
            return
        if is_reserved(connection.descriptor):
            self._refuse(connection)
            return
        task = self._group.create_task(self._serve(connection))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, connection))

    def _refuse(self, connection: Connection) -> None:
        """The frontend tries again with a back-off."""
        if self._throttle.should_log():
            log.warning("no room for more sessions", why="the limit of open files is reached", peer=connection.peer)
        connection.abort()

    def _forget(self, connection: Connection, task: asyncio.Task[None]) -> None:
        """The session has ended, or was cancelled before it started."""
        self._tasks.discard(task)
        connection.close()

    async def _serve(self, connection: Connection) -> None:
        try:
            await self._attach(connection)
        except Exception:  # A bug costs this frontend its session; its streams continue elsewhere.
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
        if self._secure is not None:
            self._secure.handshakes.close()
        try:
            if self._tasks and error is None:
                await asyncio.wait(self._tasks, timeout=CLOSE_GRACE_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await self._group.__aexit__(None, None, None)  # An error of the context's body is not wrapped.
