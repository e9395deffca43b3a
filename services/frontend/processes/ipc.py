"""Communication between the processes of one frontend: HTTP over Unix sockets in a private folder.

The supervisor sends each process what is asked of the frontend as a whole. Each process sends such requests to the
supervisor, which asks all. No token takes this way, only metrics, cancels by request id and threshold changes.
"""

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.frontend.control import Changes, FrontendControl
from services.http.errors import envelope
from services.http.ops_server import exposition_response

SUPERVISOR_SOCKET = "supervisor.sock"
PROCESS_ANSWER_S_MAX = 1.0
"""How long the supervisor waits for the answer of a process."""
SUPERVISOR_ANSWER_S_MAX = 3.0
"""How long a process waits for the answer of the supervisor, which may itself be waiting for other processes."""
SHUTDOWN_S_MAX = 0.5
_EXITED_ERRNOS = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
"""Errors of a connection to a process that has exited. Any other error means a lack of resources on either side."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _SetThresholds(msgspec.Struct):
    model: str
    changes: dict[str, Any]


class _Cancel(msgspec.Struct):
    request_id: str


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

    async def cancel(self, request_id: str) -> int:
        return _decode(await self._ask("POST", "/cancel", _Cancel(request_id)), _Cancelled).cancelled

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


def control_app(
    control: FrontendControl, join: Callable[[str, Path, int], JoinResponse] | None = None
) -> web.Application:
    """Build the app that answers a RemoteControl from `control`.

    join: adds a process to the group, given its name, its socket and its pid. Only the supervisor has it.
    """

    async def on_metrics(_: web.Request) -> web.Response:
        return exposition_response(await control.exposition())

    async def on_cancel(request: web.Request) -> web.Response:
        cancel = _decode(await request.read(), _Cancel)
        return _answer(_Cancelled(await control.cancel(cancel.request_id)))

    async def on_thresholds(request: web.Request) -> web.Response:
        thresholds = _decode(await request.read(), _SetThresholds)
        await control.set_thresholds(thresholds.model, thresholds.changes)
        return web.Response()

    async def on_join(request: web.Request) -> web.Response:
        assert join is not None, "only the supervisor has this route"
        new = _decode(await request.read(), _Join)
        return _answer(join(new.name, Path(new.path), new.pid))

    app = web.Application(middlewares=[_send_failures])
    app.add_routes(
        [
            web.get("/metrics", on_metrics),
            web.post("/cancel", on_cancel),
            web.post("/thresholds", on_thresholds),
            *([web.post("/join", on_join)] if join is not None else []),
        ]
    )
    return app


@web.middleware
async def _send_failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a Failure as an error body, which RemoteControl turns back into a Failure."""
    try:
        return await handler(request)
    except Failure as failure:
        return _error_response(failure, request.path)
    except Exception as error:
        return _error_response(bug_failure(error, request.path), request.path)


def _error_response(failure: Failure, path: str) -> web.Response:
    return web.Response(body=envelope(failure, path), status=failure.traits.http)


def _answer(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body))


@asynccontextmanager
async def serve_control(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Serve `app` on the socket `path`. A handler is cancelled when its client disconnects. Raises OSError."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, handler_cancellation=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()
