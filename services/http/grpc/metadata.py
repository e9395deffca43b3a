"""Metadata, timeouts and statuses as header fields."""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import quote

from grpc import StatusCode

from services.core.errors import Failure, Reason, invalid
from services.http.h2.wire.fields import encode_fields, encode_status
from services.rpc.status import status_of

Metadata = tuple[tuple[str, str | bytes], ...]

BINARY_SUFFIX = "-bin"
DETAILS = f"grpc-status-details{BINARY_SUFFIX}"
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_RESERVED = frozenset({"content-type", "te", "host", "content-length"})
_UNQUOTED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class RpcError(Exception):
    """An rpc that ends with a status other than OK.

    `trailing`: the metadata with it. `failure`: what it says; None: the status is of a handler's own choice.
    """

    def __init__(self, code: StatusCode, message: str, trailing: Metadata = (), failure: Failure | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.trailing = trailing
        self.failure = failure


def failed(failure: Failure, request_id: str = "", code: StatusCode | None = None) -> RpcError:
    """The status of a failure, with its ErrorInfo. `code`: replaces the one of its reason."""
    status = status_of(failure, request_id=request_id)
    if code is not None:
        status.code = code.value[0]
    trailing = ((DETAILS, status.SerializeToString()),)
    return RpcError(code or failure.traits.grpc, status.message, trailing, failure)


def misused(code: StatusCode, detail: str, hint: str | None = None) -> RpcError:
    """The status of an rpc that gRPC does not allow. `code`: what gRPC prescribes for it."""
    return failed(Failure(Reason.INVALID_ARGUMENT, detail, hint=hint), code=code)


def timeout_s_in(headers: Mapping[str, str]) -> float | None:
    """The timeout that the client has set. Raises RpcError."""
    given = headers.get("grpc-timeout")
    if given is None:
        return None
    if (found := _TIMEOUT.fullmatch(given)) is None:
        raise failed(invalid("grpc-timeout", "grpc-timeout must be up to eight digits and one of H, M, S, m, u, n"))
    return int(found[1]) * _UNITS_S[found[2]]


def metadata_in(headers: Mapping[str, str]) -> Metadata:
    """What the application may read. Raises RpcError if a binary value cannot be decoded."""
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers.items():
        if name in _RESERVED or name.startswith("grpc-"):
            continue
        if name.endswith(BINARY_SUFFIX):
            metadata += [(name, _decoded(name, one.strip())) for one in value.split(",")]
        else:
            metadata.append((name, value))
    return tuple(metadata)


def _decoded(name: str, value: str) -> bytes:
    try:
        return base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:  # That of characters beyond ASCII is no binascii.Error.
        raise failed(invalid(name, f"the metadata {name[:50]} is not in base64")) from None


def text_fields(metadata: Iterable[tuple[str, str | bytes]]) -> list[tuple[str, str]]:
    """Metadata as header fields, with binary values in base64."""
    fields = []
    for name, value in metadata:
        if isinstance(value, bytes) or name.endswith(BINARY_SUFFIX):
            raw = value if isinstance(value, bytes) else value.encode()
            fields.append((name, binascii.b2a_base64(raw, newline=False).decode("ascii").rstrip("=")))
        else:
            fields.append((name, value))
    return fields


@lru_cache(maxsize=4)
def _head(encoding: str) -> bytes:
    """The fields that every answer begins with."""
    fields = {"content-type": "application/grpc", **encoding_fields(encoding)}
    return encode_status(200) + encode_fields(fields.items())


def encoding_fields(encoding: str) -> dict[str, str]:
    """The fields about compression. `encoding`: of compressed messages; empty: there are none."""
    fields = {"grpc-accept-encoding": "identity,gzip"}
    return fields | {"grpc-encoding": encoding} if encoding else fields


def head_block(metadata: Iterable[tuple[str, str | bytes]], encoding: str = "") -> bytes:
    """The block of an answer's head. `encoding`: of compressed messages."""
    return _head(encoding) + encode_fields(text_fields(metadata))


def status_fields(
    code: StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()
) -> list[tuple[str, str]]:
    """A status as header fields."""
    number: int = code.value[0]
    fields = [("grpc-status", str(number))]
    if message:
        plain = message.isascii() and message.isprintable() and "%" not in message
        fields.append(("grpc-message", message if plain else quote(message, safe=_UNQUOTED)))
    return fields + text_fields(metadata)


def trailers_block(code: StatusCode, message: str, metadata: Metadata = ()) -> bytes:
    """The block of the trailers. An answer without messages has no more than its head and these."""
    if code is StatusCode.OK and not message and not metadata:
        return _OK
    return encode_fields(status_fields(code, message, metadata))


_OK = encode_fields([("grpc-status", "0")])
