"""Header fields: what a client sends, decoded and checked, and what a server sends, encoded.

Answers are encoded without a dynamic table: their few fields are the same but for ids and dates, encoding is a join of
bytes that were made before, and a connection holds no state for it. Source: RFC 7541; RFC 9113, sections 8.2 and 8.3.

To decode a block takes a third of the time of a small request, and clients of gRPC send the same one again and again:
so the last one of a connection is remembered.
"""

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from hpack import Decoder, HPACKError, OversizedHeaderListError
from msgspec import Struct
from msgspec.structs import replace

from services.core.errors import quoted
from services.http.h1.parser import HEAD_BYTES_MAX, head_too_large, path_of
from services.http.h2.wire.frames import ErrorCode, H2Error, StreamError
from services.http.h2.wire.header_block import BLOCK_BYTES_MAX
from services.http.server.context import BrokenHead

Fields = list[tuple[bytes, bytes]]

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_NOT_A_VALUE = re.compile(rb"[\x00\r\n]|^[ \t]|[ \t]$")
_OF_CONNECTIONS = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = (b":method", b":scheme", b":path")
_STATUSES = {200: b"\x88", 204: b"\x89", 206: b"\x8a", 304: b"\x8b", 400: b"\x8c", 404: b"\x8d", 500: b"\x8e"}
"""Statuses with an index of their own. Source: RFC 7541, appendix A."""
_LENGTH_MAX = 0x7F
"""A length from here on takes further bytes. Source: RFC 7541, section 5.1."""


class RequestHead(Struct):
    """The head of a request.

    `headers`: by name; several values of one are joined. `path`: see HttpRequest. `size`: bytes of memory that it
    takes, about. `broken`: why it is to be refused.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    content_length: int | None = None
    size: int = 0
    broken: BrokenHead | None = None


FIELD_BYTES = 200
"""Memory that a field takes besides its bytes: two strings, and its place in a dict."""
ENTRY_BYTES = 32
"""What the protocol counts for a field besides its bytes. Source: RFC 9113, section 6.5.2."""
BLOCK_BYTES_KEPT = 1024
"""The largest block that is remembered."""


class FieldDecoder:
    """Decodes the blocks of one connection.

    A block is remembered if it has left the dynamic table as it was, until another one is decoded: until then, the same
    bytes have the same meaning.
    """

    __slots__ = ("_block", "_decoder", "_fields", "_head")

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=BLOCK_BYTES_MAX)
        self._block: bytes | None = None
        self._fields: Fields = []
        self._head: RequestHead | None = None

    def decode(self, block: bytes) -> Fields:
        """The fields of a block. Raises H2Error: what follows it cannot be decoded."""
        if block == self._block:
            return self._fields
        newest, *sizes = self._table()
        fields = self._decoded(block)
        newest_now, *sizes_now = self._table()
        self._head = None
        if newest_now is newest and sizes_now == sizes and len(block) <= BLOCK_BYTES_KEPT:
            self._block, self._fields = block, fields
        else:
            self._block, self._fields = None, []
        return fields

    def head_of(self, fields: Fields) -> RequestHead:
        """The head of a request. `fields`: as `decode` has returned them. Raises StreamError."""
        if fields is not self._fields:
            return head_of(fields)
        if self._head is None:
            self._head = head_of(fields)
        head = self._head
        return replace(head, headers=dict(head.headers))

    def _table(self) -> tuple[object, int, int]:
        """What changes whenever the dynamic table does: its newest entry, an object of its own, and its sizes."""
        entries = self._decoder.header_table.dynamic_entries
        return entries[0] if entries else None, len(entries), self._decoder.header_table_size

    def _decoded(self, block: bytes) -> Fields:
        try:
            return [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            why = f"header fields of more than {BLOCK_BYTES_MAX} bytes"
            raise H2Error(ErrorCode.ENHANCE_YOUR_CALM, why) from None
        except HPACKError as error:
            raise H2Error(ErrorCode.COMPRESSION_ERROR, f"header fields cannot be decoded: {error}"[:200]) from None


def head_of(fields: Fields) -> RequestHead:
    """The head of a request. Raises StreamError."""
    pseudo: dict[bytes, bytes] = {}
    headers: dict[str, str] = {}
    for name, value in fields:
        if name[:1] == b":":
            if headers or name not in _PSEUDO or name in pseudo:
                raise _malformed(name)
            _check_value(name, value)
            pseudo[name] = value
        else:
            _add(headers, name, value)
    for name in _REQUIRED:
        if not pseudo.get(name):
            raise _malformed(name)
    broken = None
    if b":authority" in pseudo:
        broken = _take_authority(headers, pseudo[b":authority"].decode("latin-1"))
    path = pseudo[b":path"].decode("latin-1")
    if not path.startswith("/") and path != "*":
        raise _malformed(b":path")
    size = sum([len(name) + len(value) for name, value in fields])
    if size + ENTRY_BYTES * len(fields) > HEAD_BYTES_MAX:
        broken = head_too_large()
    return RequestHead(
        method=pseudo[b":method"].decode("latin-1"),
        path=path_of(path),
        headers=headers,
        content_length=_content_length(headers),
        size=size + FIELD_BYTES * len(fields),
        broken=broken,
    )


def _take_authority(headers: dict[str, str], authority: str) -> BrokenHead | None:
    """Have the host of the request where HTTP/1.1 has it. Returns what is wrong. Source: RFC 9113, section 8.3.1."""
    given = headers.get("host", authority)
    headers["host"] = authority
    if given.lower() == authority.lower():
        return None
    return BrokenHead(400, f"host is {quoted(given)} and :authority is {quoted(authority)}: send one of them")


def check_trailers(fields: Fields) -> None:
    """Check the trailers of a request, which are ignored otherwise. Raises StreamError."""
    for name, value in fields:
        _add({}, name, value)


def _add(headers: dict[str, str], name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise _malformed(name)
    _check_value(name, value)
    key, text = name.decode("latin-1"), value.decode("latin-1")
    given = headers.get(key)
    if given is not None:
        text = f"{given}; {text}" if key == "cookie" else f"{given}, {text}"  # RFC 9113, section 8.2.3.
    headers[key] = text


def _check_value(name: bytes, value: bytes) -> None:
    if _NOT_A_VALUE.search(value):
        raise _malformed(name)


def _content_length(headers: Mapping[str, str]) -> int | None:
    given = headers.get("content-length")
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 19):
        raise _malformed(b"content-length")
    return int(given)


def _malformed(name: bytes) -> StreamError:
    return StreamError(ErrorCode.PROTOCOL_ERROR, f"the field {name[:50]!r} is wrong, given twice or missing")


def encode_status(status: int) -> bytes:
    """The field `:status`."""
    return _STATUSES.get(status) or literal(b":status", str(status).encode())


def encode_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Fields as a block. Names may have capitals."""
    return b"".join([_encoded_name(name) + _encoded(value.encode("latin-1")) for name, value in fields])


def literal(name: bytes, value: bytes) -> bytes:
    """A literal field without indexing. Source: RFC 7541, section 6.2.2."""
    return b"\0" + _encoded(name) + _encoded(value)


@lru_cache(maxsize=256)
def _encoded_name(name: str) -> bytes:
    return b"\0" + _encoded(name.lower().encode("ascii"))


def _encoded(text: bytes) -> bytes:
    size = len(text)
    if size < _LENGTH_MAX:
        return bytes((size,)) + text
    length, size = bytearray((_LENGTH_MAX,)), size - _LENGTH_MAX
    while size >= 0x80:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + text
