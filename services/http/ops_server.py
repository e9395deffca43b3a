"""`/metrics`, `/live` and `/health` for processes whose own service is not HTTP."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.runtime.listen import bare_host, cannot_listen, split_listen


def exposition_response(exposition: bytes) -> web.Response:
    """Metrics in Prometheus' text format, as a response."""
    return web.Response(body=exposition, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def start_ops(listen: str, metrics: CollectorRegistry, is_ready: Callable[[], bool]) -> tuple[web.AppRunner, str]:
    """Serve on `host:port`; returns what to clean up and the real address. Raises StartupError if it can't be had.

    `/live` is 200 as long as the process answers; `/health` is 503 when it should get no traffic.
    """

    host, port = split_listen(listen)

    async def on_metrics(_: web.Request) -> web.Response:
        return exposition_response(generate_latest(metrics))

    async def on_live(_: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def on_health(_: web.Request) -> web.Response:
        ready = is_ready()
        return web.json_response({"status": "ready" if ready else "not_ready"}, status=200 if ready else 503)

    app = web.Application()
    app.add_routes([web.get("/metrics", on_metrics), web.get("/live", on_live), web.get("/health", on_health)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, bare_host(host), port).start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen("metrics", listen, error, option="--metrics-port") from error
    return runner, f"{host}:{runner.addresses[0][1]}"
