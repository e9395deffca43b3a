"""The body of a request, once it is unpacked."""

import zlib

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, quoted
from services.http.server.messages import HttpRequest
from services.http.server.parser import too_large

_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""Of encodings, as zlib wants them. Source: RFC 9110, section 8.4.1; the documentation of zlib's `decompressobj`."""


async def body_of(request: HttpRequest, bytes_max: int, executor: BoundedExecutor) -> bytes:
    """The body, in a thread if it is compressed. bytes_max: of it, unpacked. Raises Failure if there is no such."""
    if request.fault is not None:
        raise request.fault
    encoding = request.headers.get("content-encoding", "identity").lower()
    body = request.body
    if encoding != "identity":
        body = await executor.run(_unpacked, body, encoding, bytes_max)
    if len(body) > bytes_max:
        raise too_large(bytes_max)
    return body


def _unpacked(body: bytes, encoding: str, bytes_max: int) -> bytes:
    if encoding not in _WINDOWS:
        known = ", ".join(_WINDOWS)
        raise _invalid(f"the body's Content-Encoding {quoted(encoding)} is not known here: use one of {known}, or none")
    unpacking = zlib.decompressobj(_WINDOWS[encoding])
    try:
        unpacked = unpacking.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise _invalid(f"the body is not {encoding} as its headers say: {error}") from error
    if len(unpacked) <= bytes_max and not unpacking.eof:
        raise _invalid(f"the body breaks off: it is {encoding}, and not all of it is there")
    if unpacking.unused_data:
        raise _invalid(f"the body goes on after its end: send it as one piece of {encoding}")
    return unpacked


def _invalid(detail: str) -> Failure:
    return Failure(Reason.INVALID_ARGUMENT, detail)
