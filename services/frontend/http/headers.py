"""What a client may say in headers: the request's name and how long it waits."""

import asyncio
import math
import re
import uuid

from aiohttp import web

from services.errors import invalid
from services.frontend.http.config import HttpConfig

REQUEST_ID = "X-Request-Id"
REQUEST_TIMEOUT = "X-Request-Timeout"
_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id_of(request: web.Request) -> str:
    """The client's `X-Request-Id`, else a new one.

    One that is not of 1 to 128 letters, digits, '-', '_', '.' and ':' is replaced: a proxy's odd habit must not cost an
    answer, and the response's own header says which id counts.
    """
    given = request.headers.get(REQUEST_ID, "")
    return given if _REQUEST_ID_FORM.fullmatch(given) else uuid.uuid4().hex


def deadline_of(request: web.Request, config: HttpConfig) -> float | None:
    """The deadline in loop time: `X-Request-Timeout` in seconds, else the configured one.

    Raises Failure(INVALID_ARGUMENT) if it is not a finite number above 0.
    """
    given = request.headers.get(REQUEST_TIMEOUT)
    timeout_s = config.request_timeout_s if given is None else _seconds(given)
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise invalid(REQUEST_TIMEOUT, f"the header {REQUEST_TIMEOUT} must be a number of seconds above 0")
    return seconds
