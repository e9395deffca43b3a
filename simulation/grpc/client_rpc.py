"""The client's end of one rpc, on an HTTP/2 connection of its own."""

import asyncio
import base64
from collections.abc import Mapping
from typing import Any

from google.rpc import error_details_pb2, status_pb2
from hpack import Decoder, Encoder

from services.http.grpc.messages import MessageReader
from services.http.h2.wire.frames import (
    ACK,
    DATA,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Frame,
    FrameReader,
    frame,
    headers_frames,
    window_update,
)

WINDOW_BYTES = 65_535
"""What the server may send ahead of what the client has taken, unless it is told otherwise. RFC 9113, section 6.9.2."""
_STREAM = 1


class ClientRpc(asyncio.Protocol):
    """One rpc. `trailers`: None until they have come. `lost`: why nothing more comes."""

    def __init__(self) -> None:
        self.trailers: Mapping[str, str] | None = None
        self.lost = ""
        self._transport: Any = None
        self._frames = FrameReader()
        self._decoder = Decoder()
        self._messages = MessageReader()
        self._has_preface = False
        self._untaken_size = 0
        self._changed = asyncio.Event()

    async def open(self, host: str, port: int) -> None:
        """Connect. Raises OSError."""
        await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        while self._transport is None:
            await self._wait()

    def begin(self, path: str, metadata: Mapping[str, str], window: int = WINDOW_BYTES) -> None:
        """Send the head of the request. `window`: see WINDOW_BYTES."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "127.0.0.1",
            "te": "trailers",
            "content-type": "application/grpc",
            **metadata,
        }
        settings = frame(SETTINGS, 0, 0, b"\x00\x04" + window.to_bytes(4, "big"))
        block = Encoder().encode(list(fields.items()), huffman=False)
        self._transport.write(PREFACE + settings + headers_frames(_STREAM, block, is_last=False))

    def send(self, message: bytes, *, is_last: bool) -> None:
        """Send a message of the request."""
        content = b"\x00" + len(message).to_bytes(4, "big") + message
        self._transport.write(frame(DATA, END_STREAM if is_last else 0, _STREAM, content))

    @property
    def is_over(self) -> bool:
        return self.trailers is not None or bool(self.lost)

    async def next(self) -> bytes | None:
        """The next message; None: there is none any more."""
        while (message := self._messages.next()) is None:
            if self.is_over:
                return None
            self.take()  # A message may be larger than the window.
            await self._wait()
        return message[1]

    def take(self) -> None:
        """Let the server send as much again as has come."""
        if (size := self._untaken_size) and not self.is_over:
            self._untaken_size = 0
            self._transport.write(window_update(0, size) + window_update(_STREAM, size))

    def abort(self) -> None:
        """Drop the connection."""
        self.lost = self.lost or "aborted"
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # The connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._changed.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self.trailers is None:
            self.lost = self.lost or ("reset" if error else "closed")
        self._changed.set()

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (one := self._frames.next()) is not None:
            self._receive(one)
        self._changed.set()

    def _receive(self, one: Frame) -> None:
        if one.kind == HEADERS:
            fields: dict[str, str] = dict(self._decoder.decode(one.payload))  # type: ignore[arg-type]
            if one.flags & END_STREAM:
                self.trailers = fields
        elif one.kind == DATA:
            self._messages.feed(one.payload)
            self._untaken_size += len(one.payload)
        elif one.kind in (SETTINGS, PING) and not one.flags & ACK:
            self._transport.write(frame(one.kind, ACK, 0, one.payload if one.kind == PING else b""))
        elif one.kind == RST_STREAM:
            self.lost = "stream reset"
        elif one.kind == GOAWAY and int.from_bytes(one.payload[:4], "big") < _STREAM:
            self.lost = "refused with GOAWAY"


def reason_in(trailers: Mapping[str, str]) -> str:
    """The reason of a failure: that of its ErrorInfo, or else the status itself."""
    encoded = trailers.get("grpc-status-details-bin", "")
    status = status_pb2.Status.FromString(base64.b64decode(encoded + "=" * (-len(encoded) % 4)))
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return {"1": "CANCELLED", "4": "DEADLINE_EXCEEDED"}.get(
        trailers["grpc-status"], f"status {trailers['grpc-status']}"
    )
