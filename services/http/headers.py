"""What a client may say in headers: the request's name, how long it waits, how often it may move."""

import math
import secrets
from collections.abc import Iterator

from services.core.errors import invalid
from services.core.validation import NAME_FORM
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from services.runtime.loop import clock

REQUEST_ID = "X-Request-Id"
REQUEST_TIMEOUT = "X-Request-Timeout"
RETURN_PARTIAL = "X-Return-Partial"
IDS_AT_ONCE = 256
REQUEST_TIMEOUT_S_MAX = 86_400.0
"""One day. A time without measure would overflow on its way to the worker."""


def request_id_of(request: HttpRequest) -> str:
    """The client's `X-Request-Id`, else a new one.

    One that is not of 1 to 128 letters, digits, '-', '_', '.' and ':' is replaced: a proxy's odd habit must not cost an
    answer, and the response's own header says which id counts.
    """
    given = request.headers.get("x-request-id")
    return given if given and NAME_FORM.fullmatch(given) else new_request_id()


def _random_ids() -> Iterator[str]:
    """Of 128 bits, not to be guessed: who knows one can cancel its request. Many at once, for each is a system call."""
    while True:
        digits = secrets.token_hex(16 * IDS_AT_ONCE)
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_ids = _random_ids()


def new_request_id() -> str:
    """For a request that brings none."""
    return next(_ids)


def deadline_of(request: HttpRequest, config: HttpConfig) -> float | None:
    """The deadline in loop time: `X-Request-Timeout` in seconds, else the configured one.

    Raises Failure(INVALID_ARGUMENT) if it is not a number above 0, up to REQUEST_TIMEOUT_S_MAX.
    """
    given = request.headers.get(REQUEST_TIMEOUT.lower())
    timeout_s = config.request_timeout_s if given is None else _seconds(given)
    return None if timeout_s is None else clock() + timeout_s


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= REQUEST_TIMEOUT_S_MAX:  # Not a number is neither.
        bounds = f"above 0, up to {REQUEST_TIMEOUT_S_MAX:.0f}"
        raise invalid(REQUEST_TIMEOUT, f"the header {REQUEST_TIMEOUT} must be a number of seconds {bounds}")
    return seconds


def wants_partial(request: HttpRequest) -> bool:
    """Whether an answer that fails halfway is to be told as far as it came: `X-Return-Partial`.

    Raises Failure(INVALID_ARGUMENT) if it is neither true nor false.
    """
    given = request.headers.get(RETURN_PARTIAL.lower(), "false").lower()
    if given not in {"true", "false"}:
        raise invalid(RETURN_PARTIAL, f"the header {RETURN_PARTIAL} must be true or false")
    return given == "true"
