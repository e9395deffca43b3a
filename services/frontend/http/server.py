"""Listens for HTTP clients."""

import errno

from aiohttp import web

from services.frontend.http.app import CONFIG
from services.lifetime import StartupError


async def start_http(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Serve `app` at host:port; 0 takes any free port. Returns the runner, to be cleaned up, and the real port.

    A client that leaves has its handler cancelled, streamed or not. Raises StartupError when the address can't be had.
    """
    config = app[CONFIG]
    runner = web.AppRunner(
        app,
        access_log=None,  # Observe writes it, with the outcome.
        handler_cancellation=True,
        keepalive_timeout=config.keepalive_s,
        shutdown_timeout=config.shutdown_s_max,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=config.backlog).start()
    except OSError as error:
        await runner.cleanup()
        raise StartupError(_sentence(error, host, port)) from error
    return runner, int(runner.addresses[0][1])


def _sentence(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the HTTP port {port} on {host} is in use: stop what holds it, or choose another with --http-listen"
    return f"cannot listen for HTTP on {host}:{port}: {error.strerror or error}"
