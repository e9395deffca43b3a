"""The end of every response: its last bytes, within a bound."""

import asyncio

import structlog
from aiohttp import web

from services.errors import Reason
from services.frontend.http.config import HttpConfig

log = structlog.get_logger()


async def finish_sending(
    request: web.Request, response: web.StreamResponse, config: HttpConfig, request_id: str, last: bytes = b""
) -> None:
    """Send what is left of the response and `last`. A client that does not take it in time is cut, and logged."""
    try:
        async with asyncio.timeout(config.client.drain_s_max):
            await response.prepare(request)
            await response.write_eof(last)
    except ConnectionError:
        log.debug("client left before the end of the answer", reason=Reason.CANCELLED, request_id=request_id)
    except TimeoutError:
        log.warning("client cut", reason=Reason.SLOW_CLIENT, request_id=request_id)
        if request.transport is not None:
            request.transport.abort()
