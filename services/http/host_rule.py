"""Refuses requests by their `Host` and `Origin`, so that no page of elsewhere can use a server through its visitor.

| server | request | answer |
| --- | --- | --- |
| any | over HTTP/1.1 without `Host`, or with two | INVALID_ARGUMENT |
| that needs no keys, and listens on loopback only | with a `Host` that is no name of this machine | INVALID_ARGUMENT |
| that needs no keys | from a page of another origin, unless CORS allows it | UNAUTHENTICATED |

The second row is against DNS rebinding: a page's own name is made to mean 127.0.0.1. The third is against requests that
browsers send without asking first (CSRF). Where keys are needed, a page has none. Sources: RFC 9112, section 3.2; the
Fetch standard, section 4.8, "simple requests".
"""

import re
from functools import lru_cache

from services.core.errors import Failure, Reason, invalid, quoted
from services.http.server.messages import HttpRequest
from services.runtime.address import is_local

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[^\s:/\[\],@]{0,255})(:[0-9]{0,5})?")
"""A name has 255 characters at most: RFC 1035, section 3.1."""
WHY_ORIGIN = "pages of other origins may not use a server that needs no keys"


class HostRule:
    """`is_open`: clients need no keys. `is_local`: the server listens on loopback only."""

    def __init__(self, *, is_open: bool = False, is_local: bool = False) -> None:
        self._is_open = is_open
        self._is_local = is_local

    def check(self, request: HttpRequest, *, is_allowed: bool) -> None:
        """Raises Failure. `is_allowed`: CORS allows the origin of the request."""
        name = self._name(request)
        if not self._is_open:
            return
        if self._is_local and name is not None and not _is_local(name):
            raise Failure(
                Reason.INVALID_ARGUMENT,
                f"this server listens on loopback without keys, and {quoted(name)} is no name of loopback",
                param="host",
                hint="Use localhost, or have the server need keys (--keys-file), or allow all (--allow-anonymous).",
            )
        origin = request.headers.get("origin")
        if origin is not None and not is_allowed and not _is_same(origin, request.headers.get("host", "")):
            raise Failure(
                Reason.UNAUTHENTICATED,
                f"{WHY_ORIGIN}, and this is {quoted(origin)}",
                hint="The operator can allow the origin (--cors-allow-origin), or set keys (--keys-file).",
            )

    def _name(self, request: HttpRequest) -> str | None:
        """The name in `Host`, without the port. Raises INVALID_ARGUMENT if there is none where there must be one."""
        given = request.headers.get("host")
        if given is None:
            if request.is_chunkable:  # HTTP/1.0 had no Host, and over HTTP/2 it may be missing.
                raise invalid("host", "the request has no Host: send one")
            return None
        if (found := _HOST.fullmatch(given)) is None:
            raise invalid("host", f"{quoted(given)} is no Host, or several: send one host:port")
        return found["name"]


@lru_cache(maxsize=64)
def _is_local(name: str) -> bool:
    """Most requests have the same name, and to parse it takes longer than to find their tenant."""
    return is_local(name)


def _is_same(origin: str, host: str) -> bool:
    return origin.partition("://")[2].lower() == host.lower()
