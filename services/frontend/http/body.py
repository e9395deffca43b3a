"""Reads the body of a request, within its bounds."""

import asyncio

from aiohttp import web

from services.errors import Failure, Reason


async def read_body(request: web.Request, *, bytes_max: int, read_s_max: float) -> bytes:
    """The body. bytes_max: at most the `client_max_size` of the application. Raises Failure if it is too large, too
    slow or broken.
    """
    if (request.content_length or 0) > bytes_max:
        raise _too_large(bytes_max)
    try:
        if request.content.is_eof():  # All of it is here, as most bodies are when their handler begins.
            body = request.content.read_nowait()
        else:
            async with asyncio.timeout(read_s_max):
                body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(bytes_max) from error
    except web.RequestPayloadError as error:
        detail = f"the body broke off or is not as its headers say: {error}"
        raise Failure(Reason.INVALID_ARGUMENT, detail) from error
    except TimeoutError as error:
        detail = f"the body did not arrive within {read_s_max:g} s"
        raise Failure(Reason.DEADLINE_EXCEEDED, detail) from error
    if len(body) > bytes_max:
        raise _too_large(bytes_max)
    return body


def _too_large(bytes_max: int) -> Failure:
    return Failure(Reason.BODY_TOO_LARGE, f"the body is larger than {bytes_max} bytes: send a smaller one")
