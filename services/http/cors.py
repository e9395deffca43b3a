"""Lets pages of other origins read answers in a browser, where an operator allows it.

Off unless origins are configured. Calls that ask for a token are never for pages. Source: the Fetch standard, section
3.3, "CORS protocol".
"""

from collections.abc import Iterable, Mapping, Sequence

from services.http.errors import SHOULD_RETRY
from services.http.request_id import REQUEST_ID
from services.http.server.messages import HttpRequest, Response

ANY = "*"
ALLOW = "Access-Control-Allow-Origin"
PREFLIGHT_S = 600
"""How long a browser may remember what it was told: two hours are the most that any does."""
EXPOSED = ("Retry-After", "retry-after-ms", SHOULD_RETRY, REQUEST_ID)
"""Of an answer's headers; those that a page sees anyway are left out."""
_NONE: Mapping[str, str] = {}


class Cors:
    """What answers tell browsers."""

    def __init__(self, origins: Sequence[str]) -> None:
        """origins: that may read answers; `ANY`: all."""
        self._is_any = ANY in origins
        self._origins = frozenset(origins)

    def headers_of(self, request: HttpRequest) -> Mapping[str, str]:
        """Those that every answer to the request has."""
        if not self._origins:
            return _NONE
        if self._is_any:
            return _allowed(ANY)
        origin = request.headers.get("origin")
        allowed = _allowed(origin) if origin in self._origins else _NONE
        return {**allowed, "Vary": "Origin"}  # A cache must not give one origin's answer to another.


def _allowed(origin: str) -> Mapping[str, str]:
    return {ALLOW: origin, "Access-Control-Expose-Headers": ", ".join(EXPOSED)}


def is_preflight(request: HttpRequest) -> bool:
    """Whether a browser asks if a page may ask."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def preflight(request: HttpRequest, methods: Iterable[str]) -> Response:
    """The answer to a browser whose page is of an origin that may ask. methods: that the path takes."""
    headers = {
        "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
        "Access-Control-Max-Age": str(PREFLIGHT_S),
    }
    if wanted := request.headers.get("access-control-request-headers"):
        headers["Access-Control-Allow-Headers"] = wanted  # SDKs send headers of their own, and nothing rests on them.
    return Response(b"", headers=headers)
