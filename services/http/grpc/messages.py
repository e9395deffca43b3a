"""Cuts the content of a stream into messages, and compresses and decompresses them within bounds."""

import gzip
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from grpc import StatusCode

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason
from services.http.grpc.metadata import RpcError, failed
from services.rpc.status import MESSAGE_BYTES_MAX

INLINE_BYTES_MAX = 64 * 1024
"""A message of more bytes is compressed and decompressed in a thread, so that streams on the event loop continue."""
COMPRESSED_BYTES_MIN = 1024
"""Smaller messages, as those of tokens are, are sent as they are: compressed they would cost more than they save."""
GZIP = "gzip"
IDENTITY = "identity"
_PREFIX = struct.Struct(">BI")
_GZIP_BITS = 16 + zlib.MAX_WBITS
T = TypeVar("T")


class MessageReader:
    """The messages of one request. `is_midway`: a part of the next one has come."""

    __slots__ = ("_data", "messages")

    def __init__(self) -> None:
        """`messages`: those that have come whole, and whether they are compressed."""
        self.messages: deque[tuple[bool, bytes]] = deque()
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add content. Raises RpcError."""
        self._data += data
        start = 0
        while len(self._data) - start >= _PREFIX.size:
            flag, size = _PREFIX.unpack_from(self._data, start)
            if flag > 1:
                raise RpcError(StatusCode.INTERNAL, f"a message with the flag {flag}")
            if size > MESSAGE_BYTES_MAX:
                raise too_large()
            end = start + _PREFIX.size + size
            if end > len(self._data):
                break
            self.messages.append((flag == 1, bytes(self._data[start + _PREFIX.size : end])))
            start = end
        del self._data[:start]

    @property
    def is_midway(self) -> bool:
        return bool(self._data)


def prefixed(message: bytes, flag: int = 0) -> bytes:
    """The message with its prefix. `flag`: 1: it is compressed."""
    return _PREFIX.pack(flag, len(message)) + message


def too_large() -> RpcError:
    """The error of a message above the bound."""
    why = f"the message is larger than {MESSAGE_BYTES_MAX} bytes: send a smaller one"
    return failed(Failure(Reason.BODY_TOO_LARGE, why))


class Compression:
    """Compresses and decompresses messages: small ones at once, others in a thread that all rpcs share."""

    def __init__(self) -> None:
        self._executor = BoundedExecutor()

    async def decompressed(self, message: bytes, encoding: str) -> bytes:
        """The message. `encoding`: as the request says. Raises RpcError, and Failure(OVERLOADED)."""
        if encoding != GZIP:
            raise RpcError(StatusCode.INTERNAL, "a compressed message without a grpc-encoding that says how")
        small = _inflated(message, INLINE_BYTES_MAX)
        if small is not None:
            return small
        large = await self._executor.run(_inflated, message, MESSAGE_BYTES_MAX, size=len(message))
        if large is None:
            raise too_large()
        return large

    async def run(self, function: Callable[[bytes], T], data: bytes) -> T:
        """What the function returns for the data. Raises what it raises, and Failure(OVERLOADED)."""
        if len(data) <= INLINE_BYTES_MAX:
            return function(data)
        return await self._executor.run(function, data, size=len(data))


def _inflated(message: bytes, bytes_max: int) -> bytes | None:
    """The decompressed message; None: it is larger than `bytes_max`. Raises RpcError."""
    inflater = zlib.decompressobj(_GZIP_BITS)
    try:
        content = inflater.decompress(message, bytes_max + 1)
    except zlib.error as error:
        raise RpcError(StatusCode.INTERNAL, f"the message is not in gzip as its flag says: {error}") from None
    if len(content) > bytes_max:
        return None
    if not inflater.eof or inflater.unused_data:
        raise RpcError(StatusCode.INTERNAL, "the message is not one whole member of gzip")
    return content


def compressed(message: bytes) -> bytes:
    """The message in gzip."""
    return gzip.compress(message, compresslevel=1, mtime=0)


def wants_gzip(headers: Mapping[str, str]) -> bool:
    """Whether messages to this client are compressed: it compresses its own, and says that it takes others."""
    if headers.get("grpc-encoding") != GZIP:
        return False
    return GZIP in [one.strip() for one in headers.get("grpc-accept-encoding", GZIP).split(",")]
