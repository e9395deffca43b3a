"""The id of a request: the client's `X-Request-Id`, or a new one."""

import secrets
from collections.abc import Iterator

from services.core.validation import NAME_FORM
from services.http.server.messages import HttpRequest

REQUEST_ID = "X-Request-Id"
IDS_AT_ONCE = 256
"""Ids made with one call of the operating system's random number generator."""


def request_id_of(request: HttpRequest) -> str:
    """The client's `X-Request-Id` if it matches NAME_FORM, otherwise a new id.

    An invalid id is replaced, not refused: requests of a proxy with unusual ids should still be answered. The header of
    the response has the id that counts.
    """
    given = request.headers.get("x-request-id")
    return given if given and NAME_FORM.fullmatch(given) else new_request_id()


def _random_ids() -> Iterator[str]:
    """Ids of 128 random bits. They cannot be guessed: whoever knows an id can cancel its request."""
    while True:
        digits = secrets.token_hex(16 * IDS_AT_ONCE)
        for start in range(0, len(digits), 32):
            yield digits[start : start + 32]


_ids = _random_ids()


def new_request_id() -> str:
    """A random id of 32 hexadecimal digits."""
    return next(_ids)
