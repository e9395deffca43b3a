"""A scripted chat server, and `unbroken chat` as a process that talks to it."""

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

from aiohttp import web

from tests.support.clock import WAIT_S

ERROR_BODY = {"error": {"message": "no such model", "hint": "Ask for another."}}
DONE = "data: [DONE]\n\n"


def event(text: str) -> str:
    """A server-sent event that adds `text` to the answer."""
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


class Server:
    """An HTTP server that plays one script per request, and records the requests.

    A script is a list of frames to write. A number as its first item is a status that is sent with ERROR_BODY. HANG
    waits until the client has disconnected. The last script is used for all further requests.
    """

    HANG = "hang"

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.requests: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.url = ""
        self.lost_clients = threading.Semaphore(0)
        self._listening = threading.Event()

    def __enter__(self) -> "Server":
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._listening.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._listening.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.authorizations.append(request.headers.get("Authorization"))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        if isinstance(script[0], int):
            return web.json_response(ERROR_BODY, status=script[0])
        response = web.StreamResponse()
        await response.prepare(request)
        for frame in script:
            if frame == self.HANG:
                await self._hang()
            await response.write(frame.encode())
        return response

    async def _hang(self) -> None:
        try:
            await asyncio.sleep(WAIT_S)
        finally:
            self.lost_clients.release()


def chat(server: Server, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `unbroken chat` with `text` from a pipe."""
    command = [sys.executable, "-m", "services", "chat", f"--url={server.url}", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=WAIT_S, check=False)
