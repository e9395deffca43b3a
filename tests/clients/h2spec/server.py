"""Serves `/` over HTTP, and prints its port."""

import asyncio

from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.listener import Listen, http_server
from services.http.server.messages import HttpRequest, Response
from services.runtime.loop import run_on_loop

BODY = b"some content, in more than one frame if the window is small"


async def serve() -> None:
    """Serve until killed."""
    config = HttpConfig()
    app = HttpApp(config, 1 << 20, lambda: False)

    async def answer(request: HttpRequest, exchange: Exchange) -> Response:
        return Response(BODY, headers={"Content-Type": "text/plain"})

    app.routes.get("/", answer)
    app.routes.post("/", answer)
    async with http_server(app, config, Listen("127.0.0.1:0")) as server:
        print(server.port, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_on_loop(serve())
