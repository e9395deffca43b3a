"""What a client may say in headers: the request's name, how long it waits, how often it may move."""

import asyncio
import math
import re
import uuid

from aiohttp import web

from services.errors import invalid
from services.frontend.http.config import HttpConfig

REQUEST_ID = "X-Request-Id"
REQUEST_TIMEOUT = "X-Request-Timeout"
MIGRATION_LIMIT = "X-Migration-Limit"
RETURN_PARTIAL = "X-Return-Partial"
MIGRATION_LIMIT_DIGITS_MAX = 9
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


def migration_limit_of(request: web.Request) -> int | None:
    """How often the client lets its request move: `X-Migration-Limit`; None: it leaves that to the frontend.

    Raises Failure(INVALID_ARGUMENT) if it is not a whole number of at most 9 digits.
    """
    given = request.headers.get(MIGRATION_LIMIT)
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) <= MIGRATION_LIMIT_DIGITS_MAX):
        raise invalid(MIGRATION_LIMIT, f"the header {MIGRATION_LIMIT} must be a whole number of moves, 0 for none")
    return int(given)


def wants_partial(request: web.Request) -> bool:
    """Whether an answer that fails halfway is to be told as far as it came: `X-Return-Partial`.

    Raises Failure(INVALID_ARGUMENT) if it is neither true nor false.
    """
    given = request.headers.get(RETURN_PARTIAL, "false").lower()
    if given not in {"true", "false"}:
        raise invalid(RETURN_PARTIAL, f"the header {RETURN_PARTIAL} must be true or false")
    return given == "true"
