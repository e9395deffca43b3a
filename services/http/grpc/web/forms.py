"""The two forms of gRPC-Web: binary, and as text in base64.

As all proxies do, and unlike the specification, text has the binary values of trailers in base64 twice.
"""

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass

from grpc import StatusCode

from services.http.grpc.messages import prefixed
from services.http.grpc.metadata import Metadata, misused, status_fields

PADDED_PIECES_MAX = 1024
"""Pieces of a request in base64 that each end with padding. A client needs one for each message."""
TRAILERS = 0x80
"""The flag of the message that has the status."""
_TYPE = re.compile(r"application/grpc-web(-text)?(\+proto)?(?=[;,\s]|$)")


@dataclass(frozen=True, slots=True)
class Form:
    """How the messages of a request or of an answer are written. `is_text`: in base64."""

    is_text: bool

    @property
    def content_type(self) -> str:
        return "application/grpc-web-text+proto" if self.is_text else "application/grpc-web+proto"

    def decoded(self, body: bytes) -> bytes:
        """The messages of a request. Raises RpcError."""
        return _decoded(body) if self.is_text else body

    def encoded(self, message: bytes, flag: int = 0) -> bytes:
        """A message of an answer. `flag`: see `prefixed`, and TRAILERS."""
        data = prefixed(message, flag)
        return binascii.b2a_base64(data, newline=False) if self.is_text else data

    def status(self, code: StatusCode, message: str, metadata: Metadata) -> bytes:
        """The end of an answer."""
        lines = [f"{name}: {value}\r\n" for name, value in status_fields(code, message, metadata)]
        return self.encoded("".join(lines).encode("latin-1"), TRAILERS)


def forms_of(headers: Mapping[str, str]) -> tuple[Form, Form] | None:
    """The forms of a request and of its answer, which the client may want in another form; None: it is not gRPC-Web."""
    if (sent := _TYPE.match(headers.get("content-type", "").lower())) is None:
        return None
    accepted = list(_TYPE.finditer(headers.get("accept", "").lower()))
    wants_text = any(one[1] for one in accepted) if accepted else sent[1] is not None
    return Form(is_text=sent[1] is not None), Form(is_text=wants_text)


def _decoded(text: bytes) -> bytes:
    """Base64, with padding wherever the client has ended a piece. Raises RpcError."""
    pieces: list[bytes] = []
    start = 0
    while start < len(text):
        if len(pieces) == PADDED_PIECES_MAX:
            why = f"the request has more than {PADDED_PIECES_MAX} pieces of base64: send fewer and larger ones"
            raise misused(StatusCode.RESOURCE_EXHAUSTED, why)
        end = _end_of_piece(text, start)
        try:
            pieces.append(binascii.a2b_base64(text[start:end], strict_mode=True))
        except binascii.Error as error:
            raise misused(StatusCode.INTERNAL, f"the request is not in base64 as its type says: {error}") from None
        start = end
    return b"".join(pieces)


def _end_of_piece(text: bytes, start: int) -> int:
    padding = text.find(b"=", start)
    if padding < 0:
        return len(text)
    return padding + (2 if text[padding + 1 : padding + 2] == b"=" else 1)
