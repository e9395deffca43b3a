"""Reads the body of a request, decompressed."""

import re
import zlib

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, quoted
from services.http.h1.parser import too_large
from services.http.server.messages import HttpRequest

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Content-Encoding → zlib's `wbits`. Source: RFC 9110, section 8.4.1; the documentation of zlib's `decompressobj`."""
_PIECE_BYTES = 64 * 1024
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
    try:
        content = inflated(body, _WINDOW_BITS[encoding], bytes_max)
    except zlib.error as error:
        raise _invalid(f"the body is not {encoding} as its headers say: {error}") from error
    except NotOneMember as error:
        raise _invalid(f"the body {error}: send one {encoding} member") from None
    if content is None:
        raise too_large(bytes_max)
    return content


class NotOneMember(Exception):
    """The data is less than one compressed member, or more."""


def inflated(data: bytes, window_bits: int, bytes_max: int) -> bytes | None:
    """The decompressed data; None: it is larger than `bytes_max`. Raises zlib.error and NotOneMember.

    The size is found first, without keeping the content: what expands to a gigabyte takes no memory, and what is
    accepted is allocated once.
    """
    size = _inflated_size(data, window_bits, bytes_max)
    return None if size > bytes_max else zlib.decompress(data, window_bits, bufsize=max(1, size))


def _inflated_size(data: bytes, window_bits: int, bytes_max: int) -> int:
    """The size of the decompressed data, or one above `bytes_max`."""
    inflater, size, rest = zlib.decompressobj(window_bits), 0, memoryview(data)
    while rest and not inflater.eof:
        piece: bytes | memoryview = rest[:_PIECE_BYTES]
        rest = rest[_PIECE_BYTES:]
        grown = _PIECE_BYTES
        while piece or grown == _PIECE_BYTES:  # A full piece: more may follow from the same bytes.
            grown = len(inflater.decompress(piece, _PIECE_BYTES))
            size += grown
            if size > bytes_max:
                return size
            piece = inflater.unconsumed_tail
    if not inflater.eof:
        raise NotOneMember("is incomplete")
    if inflater.unused_data or rest:
        raise NotOneMember("has bytes after its end")
    return size


def _invalid(detail: str) -> Failure:
    return Failure(Reason.INVALID_ARGUMENT, detail)
