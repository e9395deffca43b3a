"""Listens for HTTP clients."""

import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from services.frontend.http.config import CONFIG
from services.frontend.http.door import Door
from services.listening import bare_host, cannot_listen

log = logging.getLogger(__name__)


def _is_ours(record: logging.LogRecord) -> bool:
    """False for a client that does not speak HTTP: it has its 400, and nothing here is broken."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


log.addFilter(_is_ours)


async def start_http(
    app: web.Application, host: str, port: int, *, option: str = "--http-listen", is_shared: bool = False
) -> tuple[web.AppRunner, int]:
    """Serve `app` at host:port; 0 takes any free port. Returns the runner, to be cleaned up, and the real port.

    option: that which says where, for people. is_shared: whether other processes of the same frontend listen there too.
    A client that leaves has its handler cancelled, streamed or not. Raises StartupError when the address can't be had.
    """
    config = app[CONFIG]
    runner = web.AppRunner(
        app,
        logger=log,
        access_log=None,  # Observe writes it, with the outcome.
        handler_cancellation=True,
        lingering_time=config.lingering_s_max,
        keepalive_timeout=config.keepalive_s,
        shutdown_timeout=config.shutdown_s_max,
    )
    await runner.setup()
    try:
        door = Door(
            runner,
            bare_host(host),
            port,
            backlog=config.backlog,
            shutdown_s_max=config.shutdown_s_max,
            is_shared=is_shared,
        )
        await door.start()
    except OSError as error:
        await runner.cleanup()
        raise cannot_listen("HTTP", f"{host}:{port}", error, option=option) from error
    return runner, int(runner.addresses[0][1])
