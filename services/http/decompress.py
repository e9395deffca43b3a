"""Reads the body of a request, decompressed."""

import re
import zlib

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, quoted
from services.http.h1.parser import too_large
from services.http.server.messages import HttpRequest

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Content-Encoding → zlib's `wbits`. Source: RFC 9110, section 8.4.1; the documentation of zlib's `decompressobj`."""


_CHARSET = re.compile(r"charset\s*=\s*\"?([^\s;\"]+)", re.IGNORECASE)
_UTF_8 = frozenset({"utf-8", "utf8"})
_LIKE_ASCII = frozenset({"us-ascii", "ascii", "iso-8859-1", "latin1", "latin-1", "windows-1252"})
"""Clients that set these by default send JSON in ASCII."""


async def body_of(request: HttpRequest, bytes_max: int, executor: BoundedExecutor) -> bytes:
    """The body of a request. A compressed one is decompressed in a thread. `bytes_max`: after decompression.

    Raises Failure if the body is incomplete, invalid, too large, or in another encoding than UTF-8.
    """
    if request.fault is not None:
        raise request.fault
    encoding = request.headers.get("content-encoding", "").lower() or "identity"
    body = request.body
    if encoding != "identity":
        body = await executor.run(_decompressed, body, encoding, bytes_max, size=len(body))
    if len(body) > bytes_max:
        raise too_large(bytes_max)
    _check_charset(request.headers.get("content-type", ""), body)
    return body


def _check_charset(content_type: str, body: bytes) -> None:
    """Raises Failure(INVALID_ARGUMENT) if the body's Content-Type says that it is not UTF-8."""
    if (found := _CHARSET.search(content_type)) is None:
        return
    charset = found[1].lower()
    if charset not in _UTF_8 and not (charset in _LIKE_ASCII and body.isascii()):
        raise _invalid(f"the body's charset {quoted(found[1])} is not supported: send JSON in UTF-8")


def _decompressed(body: bytes, encoding: str, bytes_max: int) -> bytes:
    if encoding not in _WINDOW_BITS:
        known = ", ".join(_WINDOW_BITS)
        raise _invalid(f"the body's Content-Encoding {quoted(encoding)} is not supported: use one of {known}, or none")
    decompressor = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = decompressor.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise _invalid(f"the body is not {encoding} as its headers say: {error}") from error
    if len(content) <= bytes_max and not decompressor.eof:
        raise _invalid(f"the body is incomplete: its {encoding} data has no end")
    if decompressor.unused_data:
        raise _invalid(f"the body has bytes after the end of its {encoding} data: send one {encoding} member")
    return content


def _invalid(detail: str) -> Failure:
    return Failure(Reason.INVALID_ARGUMENT, detail)
