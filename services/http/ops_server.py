"""`/metrics`, `/live` and `/health` for processes that serve nothing else over HTTP, such as workers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.http.app import HttpApp
from services.http.errors import json_response
from services.http.server.config import HttpConfig
from services.http.server.exchange import Exchange
from services.http.server.listener import Listen, http_server
from services.http.server.messages import HttpRequest, Response

_LIVE = b'{"status": "live"}'
_READY = b'{"status": "ready"}'
_NOT_READY = b'{"status": "not_ready"}'


@asynccontextmanager
async def ops_server(listen: str, metrics: CollectorRegistry, is_ready: Callable[[], bool]) -> AsyncIterator[str]:
    """Serve on `host:port`; port 0 takes any free port. Yields the real address.

    `/live` is 200 as long as the process answers. `/health` is 503 while `is_ready()` is false: the process should get
    no requests. Raises StartupError if the address cannot be listened on.
    """
    config = HttpConfig()
    app = HttpApp(config, body_bytes_max=0, is_draining=lambda: False)

    async def expose(request: HttpRequest, exchange: Exchange) -> Response:
        return exposition_response(generate_latest(metrics))

    async def live(request: HttpRequest, exchange: Exchange) -> Response:
        return json_response(_LIVE)

    async def health(request: HttpRequest, exchange: Exchange) -> Response:
        return json_response(_READY) if is_ready() else json_response(_NOT_READY, status=503)

    app.routes.get("/metrics", expose)
    app.routes.get("/live", live)
    app.routes.get("/health", health)
    async with http_server(app, config, Listen(listen, "metrics", "--metrics-port")) as server:
        yield server.addresses[0]


def exposition_response(exposition: bytes) -> Response:
    """A response with metrics in Prometheus's text format."""
    return Response(exposition, headers={"Content-Type": CONTENT_TYPE_LATEST})
