"""CORS: lets pages of other origins read responses in a browser, if an operator allows it.

Off unless origins are configured. Private paths, which need an operator's token, are never open to pages. Source: the
Fetch standard, section 3.3, "CORS protocol".
"""

from collections.abc import Iterable, Mapping, Sequence

from services.core.generation.wish import GENERATION_ID
from services.core.tenant import RATE_COUNTS, RATE_LEFT, RATE_POLICY, RATE_RESETS
from services.core.validation import SEED_USED
from services.http.errors import SHOULD_RETRY
from services.http.request_id import REQUEST_ID
from services.http.server.messages import HttpRequest, Response

ANY = "*"
ALLOW = "Access-Control-Allow-Origin"
PREFLIGHT_S = 600
"""How long a browser may cache the response to a preflight request. No browser caches it for more than two hours."""
_EXPOSED_BY_GRPC = ("grpc-status", "grpc-message", "grpc-status-details-bin", "grpc-encoding")
EXPOSED = (
    "Retry-After",
    "retry-after-ms",
    SHOULD_RETRY,
    REQUEST_ID,
    SEED_USED,
    GENERATION_ID,
    *RATE_COUNTS,
    *RATE_RESETS,
    RATE_POLICY,
    RATE_LEFT,
    *_EXPOSED_BY_GRPC,
)
"""Response headers that pages may read, besides those that they may always read."""
_NONE: Mapping[str, str] = {}


class Cors:
    """The CORS headers of responses."""

    def __init__(self, origins: Sequence[str]) -> None:
        """`origins`: whose pages may read responses; ANY: all."""
        self._is_any = ANY in origins
        self._origins = frozenset(origins)

    def headers_of(self, request: HttpRequest) -> Mapping[str, str]:
        """The headers of every response to the request."""
        if not self._origins:
            return _NONE
        if self._is_any:
            return _allowed(ANY)
        origin = request.headers.get("origin")
        allowed = _allowed(origin) if origin in self._origins else _NONE
        return {**allowed, "Vary": "Origin"}  # A cache must not give the response for one origin to another.


def _allowed(origin: str) -> Mapping[str, str]:
    return {ALLOW: origin, "Access-Control-Expose-Headers": ", ".join(EXPOSED)}


def is_preflight(request: HttpRequest) -> bool:
    """Whether a browser asks if a page may send a request."""
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def preflight(request: HttpRequest, methods: Iterable[str]) -> Response:
    """The response to a preflight request from an allowed origin. `methods`: those of the path."""
    headers = {
        "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
        "Access-Control-Max-Age": str(PREFLIGHT_S),
    }
    if wanted := request.headers.get("access-control-request-headers"):
        headers["Access-Control-Allow-Headers"] = wanted  # SDKs send headers of their own, and none is a risk here.
    return Response(b"", headers=headers)
