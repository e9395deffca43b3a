"""Reads the body of a request, decompressed."""

import zlib

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, quoted
from services.http.server.messages import HttpRequest
from services.http.server.parser import too_large

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Content-Encoding → zlib's `wbits`. Source: RFC 9110, section 8.4.1; the documentation of zlib's `decompressobj`."""


async def body_of(request: HttpRequest, bytes_max: int, executor: BoundedExecutor) -> bytes:
    """The body of a request. A compressed one is decompressed in a thread. `bytes_max`: after decompression.

    Raises Failure if the body is incomplete, invalid or too large.
    """
    if request.fault is not None:
        raise request.fault
    encoding = request.headers.get("content-encoding", "identity").lower()
    body = request.body
    if encoding != "identity":
        body = await executor.run(_decompressed, body, encoding, bytes_max)
    if len(body) > bytes_max:
        raise too_large(bytes_max)
    return body


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
