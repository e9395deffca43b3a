"""Communication between the processes of one frontend: HTTP over Unix sockets in a private folder.

The supervisor sends each process what is asked of the frontend as a whole. Each process sends such requests to the
supervisor, which asks all. No token takes this way, only metrics, cancels by request id and threshold changes.
"""

import errno
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec

from services.core.errors import Failure, Reason
from services.core.tenant import Tenant
from services.frontend.control import Changes, FrontendControl
from services.http.app import HttpApp
from services.http.errors import json_response
from services.http.ops_server import exposition_response
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.listener import serve_sockets
from services.http.server.messages import HttpRequest, Response

SUPERVISOR_SOCKET = "supervisor.sock"
PROCESS_ANSWER_S_MAX = 1.0
"""How long the supervisor waits for the answer of a process."""
SUPERVISOR_ANSWER_S_MAX = 3.0
"""How long a process waits for the answer of the supervisor, which may itself be waiting for other processes."""
SHUTDOWN_S_MAX = 0.5
"""How long running answers may continue when a process closes its socket."""
BODY_BYTES_MAX = 1024 * 1024
"""The largest body of a request to another process."""
_CONFIG = HttpConfig(shutdown_s_max=SHUTDOWN_S_MAX, takes_reserve=True)
_EXITED_ERRNOS = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
"""Errors of a connection to a process that has exited. Any other error means a lack of resources on either side."""
T = TypeVar("T")


class _SetThresholds(msgspec.Struct):
    model: str
    changes: dict[str, Any]


class _Cancel(msgspec.Struct):
    request_id: str
    tenant: str


class _Cancelled(msgspec.Struct):
    cancelled: int


class _Join(msgspec.Struct):
    name: str
    path: str
    pid: int


class JoinResponse(msgspec.Struct, frozen=True):
    """The supervisor's answer to a process that joins.

    changes: threshold changes by model name, since the frontend started.
    is_successor: whether the process replaces one that has exited.
    """

    changes: dict[str, dict[str, Any]]
    is_successor: bool


class _Error(msgspec.Struct):
    code: str
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


class ProcessGone(Failure):
    """The process at the other end of the socket has exited."""

    def __init__(self) -> None:
        super().__init__(Reason.DRAINING, "the process of this frontend has exited")


class RemoteControl:
    """FrontendControl over a socket: of the whole frontend (the supervisor's socket) or of one process."""

    def __init__(self, path: Path, answer_s_max: float) -> None:
        self.path = path
        self._timeout = aiohttp.ClientTimeout(total=answer_s_max)

    async def exposition(self) -> bytes:
        return await self._ask("GET", "/metrics")

    async def cancel(self, request_id: str, tenant: Tenant) -> int:
        return _decode(await self._ask("POST", "/cancel", _Cancel(request_id, tenant.name)), _Cancelled).cancelled

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        await self._ask("POST", "/thresholds", _SetThresholds(model, dict(changes)))

    async def join(self, name: str, path: Path) -> JoinResponse:
        """Register this process, which answers at `path`, as `name`. Only the supervisor's socket supports this."""
        return _decode(await self._ask("POST", "/join", _Join(name, str(path), os.getpid())), JoinResponse)

    async def _ask(self, method: str, route: str, body: msgspec.Struct | None = None) -> bytes:
        """Send one request and return the answer's body.

        Raises ProcessGone, Failure(STALLED), and the failure that the other process answered with.
        """
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with (
                aiohttp.ClientSession(
                    connector=aiohttp.UnixConnector(str(self.path)), timeout=self._timeout
                ) as session,
                session.request(method, f"http://frontend{route}", data=data) as response,
            ):
                answer = await response.read()
        except TimeoutError as error:
            detail = f"a process of this frontend has not answered within {self._timeout.total:g} s"
            raise Failure(Reason.STALLED, detail) from error
        except aiohttp.ClientOSError as error:
            if error.errno in _EXITED_ERRNOS:
                raise ProcessGone from error
            detail = f"cannot connect to a process of this frontend: {error.strerror}"
            raise Failure(Reason.STALLED, detail) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise ProcessGone from error
        if response.status != 200:
            refusal = _decode(answer, _ErrorBody).error
            raise Failure(Reason(refusal.code), refusal.message)
        return answer


def _decode(answer: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(answer, type=kind)


def control_app(control: FrontendControl, join: Callable[[str, Path, int], JoinResponse] | None = None) -> HttpApp:
    """Build the app that answers a RemoteControl from `control`.

    join: adds a process to the group, given its name, its socket and its pid. Only the supervisor has it.
    """

    async def on_metrics(request: HttpRequest, _: Exchange) -> Response:
        return exposition_response(await control.exposition())

    async def on_cancel(request: HttpRequest, _: Exchange) -> Response:
        cancel = _body_of(request, _Cancel)
        return _answer(_Cancelled(await control.cancel(cancel.request_id, Tenant(name=cancel.tenant))))

    async def on_thresholds(request: HttpRequest, _: Exchange) -> Response:
        thresholds = _body_of(request, _SetThresholds)
        await control.set_thresholds(thresholds.model, thresholds.changes)
        return Response(b"")

    async def on_join(request: HttpRequest, _: Exchange) -> Response:
        assert join is not None, "only the supervisor has this route"
        new = _body_of(request, _Join)
        return _answer(join(new.name, Path(new.path), new.pid))

    app = HttpApp(_CONFIG, BODY_BYTES_MAX, is_draining=lambda: False)
    app.routes.get("/metrics", on_metrics)
    app.routes.post("/cancel", on_cancel)
    app.routes.post("/thresholds", on_thresholds)
    if join is not None:
        app.routes.post("/join", on_join)
    return app


def _body_of(request: HttpRequest, kind: type[T]) -> T:
    if request.fault is not None:
        raise request.fault
    return _decode(request.body, kind)


def _answer(body: msgspec.Struct) -> Response:
    return json_response(msgspec.json.encode(body))


@asynccontextmanager
async def serve_control(app: HttpApp, path: Path) -> AsyncIterator[None]:
    """Serve `app` on the socket `path`. A handler is cancelled when its client disconnects. Raises OSError."""
    with _listener(path) as listener:
        async with serve_sockets(app, _CONFIG, [listener]):
            yield


@contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        path.unlink(missing_ok=True)  # An exited process that had the same pid may have left it.
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(_CONFIG.backlog)
        yield listener
