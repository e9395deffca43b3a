"""Cuts the content of a stream into messages, and compresses and decompresses them within bounds."""

import gzip
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from grpc import StatusCode

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason
from services.http.decompress import NotOneMember, inflated
from services.http.grpc.metadata import RpcError, failed, misused
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
    """The messages of one request. They are cut when they are read: many small ones need no more memory than they have
    bytes.
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add content. Raises RpcError if the next message is too large, before it has come."""
        self._data += data
        self._next_end()

    def next(self) -> tuple[bool, bytes] | None:
        """The next message, and whether it is compressed; None: it has not come whole. Raises RpcError."""
        if not (end := self._next_end()):
            return None
        message = bytes(memoryview(self._data)[_PREFIX.size : end])
        is_compressed = self._data[0] == 1
        del self._data[:end]
        return is_compressed, message

    def _next_end(self) -> int:
        """Where the next message ends; 0: it has not come whole."""
        if len(self._data) < _PREFIX.size:
            return 0
        flag, size = _PREFIX.unpack_from(self._data)
        if flag > 1:
            raise misused(StatusCode.INTERNAL, f"a message with the flag {flag}")
        if size > MESSAGE_BYTES_MAX:
            raise too_large()
        end: int = _PREFIX.size + size
        return end if end <= len(self._data) else 0

    @property
    def has_next(self) -> bool:
        """Whether a whole message has come. Raises RpcError."""
        return self._next_end() > 0

    @property
    def has_more_than_one(self) -> bool:
        """Whether something follows the first message. Raises RpcError."""
        return 0 < self._next_end() < len(self._data)

    @property
    def size(self) -> int:
        """Bytes that were not read."""
        return len(self._data)


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
            raise misused(StatusCode.INTERNAL, "a compressed message without a grpc-encoding that says how")
        if len(message) <= INLINE_BYTES_MAX and (small := _inflated(message, INLINE_BYTES_MAX)) is not None:
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
    try:
        return inflated(message, _GZIP_BITS, bytes_max)
    except zlib.error as error:
        raise misused(StatusCode.INTERNAL, f"the message is not in gzip as its flag says: {error}") from None
    except NotOneMember:
        raise misused(StatusCode.INTERNAL, "the message is not one whole member of gzip") from None


def compressed(message: bytes) -> bytes:
    """The message in gzip."""
    return gzip.compress(message, compresslevel=1, mtime=0)


def wants_gzip(headers: Mapping[str, str]) -> bool:
    """Whether messages to this client are compressed: it compresses its own, and says that it takes others."""
    if headers.get("grpc-encoding") != GZIP:
        return False
    return GZIP in [one.strip() for one in headers.get("grpc-accept-encoding", GZIP).split(",")]
