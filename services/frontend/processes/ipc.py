"""How the processes of one frontend speak with each other: HTTP over sockets in a folder that is theirs alone.

The supervisor asks each process what a whole frontend is asked, and each process asks the supervisor, which asks all.
Nothing here is near a token: only scrapes, cancels by name and what operators set go this way.
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
"""How long the supervisor waits for a process."""
SUPERVISOR_ANSWER_S_MAX = 3.0
"""How long a process waits for the supervisor, which may have to wait for others first."""
SHUTDOWN_S_MAX = 0.5
_ENDS = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
"""What connections to a process that has ended fail with. Anything else is want of something, here or there."""
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Setting(msgspec.Struct):
    model: str
    changes: dict[str, Any]


class _Cancelling(msgspec.Struct):
    request_id: str


class _Cancelled(msgspec.Struct):
    cancelled: int


class _Joining(msgspec.Struct):
    name: str
    path: str
    pid: int


class Welcome(msgspec.Struct, frozen=True):
    """What a process is told that joins the others.

    changes: of thresholds, by model, since the frontend began. is_successor: whether it comes in place of another.
    """

    changes: dict[str, dict[str, Any]]
    is_successor: bool


class _Refusal(msgspec.Struct):
    code: str
    message: str


class _Refused(msgspec.Struct):
    error: _Refusal


class Gone(Failure):
    """Nobody listens there any more."""

    def __init__(self) -> None:
        super().__init__(Reason.DRAINING, "the process that was asked has ended")


class Remote:
    """The whole of a frontend, or one process of it, through its socket."""

    def __init__(self, path: Path, answer_s_max: float) -> None:
        self.path = path
        self._timeout = aiohttp.ClientTimeout(total=answer_s_max)

    async def exposition(self) -> bytes:
        return await self._ask("GET", "/metrics")

    async def cancel(self, request_id: str) -> int:
        return _decode(await self._ask("POST", "/cancel", _Cancelling(request_id)), _Cancelled).cancelled

    async def set_thresholds(self, model: str, changes: Changes) -> None:
        await self._ask("POST", "/thresholds", _Setting(model, dict(changes)))

    async def join(self, name: str, path: Path) -> Welcome:
        """Have this process be asked, as `name`, at `path` from now on. The supervisor alone takes it."""
        return _decode(await self._ask("POST", "/join", _Joining(name, str(path), os.getpid())), Welcome)

    async def _ask(self, method: str, route: str, body: msgspec.Struct | None = None) -> bytes:
        """The answer. Raises Gone, STALLED, and what the other side did."""
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
            if error.errno in _ENDS:
                raise Gone from error
            detail = f"a process of this frontend cannot be asked now: {error.strerror}"
            raise Failure(Reason.STALLED, detail) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise Gone from error
        if response.status != 200:
            refusal = _decode(answer, _Refused).error
            raise Failure(Reason(refusal.code), refusal.message)
        return answer


def _decode(answer: bytes, kind: type[T]) -> T:
    return msgspec.json.decode(answer, type=kind)


def control_app(whole: FrontendControl, join: Callable[[str, Path, int], Welcome] | None = None) -> web.Application:
    """Answers for `whole`. join: takes a process in, by its name, its socket and its pid."""

    async def on_metrics(_: web.Request) -> web.Response:
        return exposition_response(await whole.exposition())

    async def on_cancel(request: web.Request) -> web.Response:
        cancelling = _decode(await request.read(), _Cancelling)
        return _answer(_Cancelled(await whole.cancel(cancelling.request_id)))

    async def on_thresholds(request: web.Request) -> web.Response:
        setting = _decode(await request.read(), _Setting)
        await whole.set_thresholds(setting.model, setting.changes)
        return web.Response()

    async def on_join(request: web.Request) -> web.Response:
        assert join is not None, "its route is there for a supervisor alone"
        joining = _decode(await request.read(), _Joining)
        return _answer(join(joining.name, Path(joining.path), joining.pid))

    app = web.Application(middlewares=[_tell_failures])
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
async def _tell_failures(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """As envelopes, from which the other side makes them again."""
    try:
        return await handler(request)
    except Failure as failure:
        return _refuse(failure, request.path)
    except Exception as error:
        return _refuse(bug_failure(error, request.path), request.path)


def _refuse(failure: Failure, path: str) -> web.Response:
    return web.Response(body=envelope(failure, path), status=failure.traits.http)


def _answer(body: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body))


@asynccontextmanager
async def answering(app: web.Application, path: Path) -> AsyncIterator[None]:
    """Serve it at `path`; whoever asks no longer is not answered, and waits for nobody. Raises OSError."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S_MAX, handler_cancellation=True)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()
