"""The transport of a session between frontend and worker: protobuf messages as frames on a TCP connection.

    connection = preamble frame*        the end that opens the connection sends the preamble
    frame      = length message         length: size of the message, 4 bytes, big-endian; at most MESSAGE_BYTES_MAX

A session is not an rpc because of the cost of an rpc: grpc.aio hands each message from a thread of its own to the event
loop, and that wake-up takes longer than all tokens of a small step. Here a message costs one read and one plain call,
and messages that arrive together share them.
"""

import asyncio
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from services.core.errors import Failure, Reason
from services.rpc.status import MESSAGE_BYTES_MAX
from services.tls.explain import why_failed

M = TypeVar("M", bound=Message)

PREAMBLE = b"unbroken.v1.Session\n"
"""Anything else means that the peer is not a compatible frontend."""
TLS_HANDSHAKE = b"\x16\x03"
"""The first bytes of a peer that speaks TLS."""
SPEAKS_TLS = "it speaks TLS, and this process has no certificate for it (--peer-cert)"
_LENGTH = Struct(">I")


def framed(message: Message) -> bytes:
    """A message as a frame."""
    body = message.SerializeToString()
    assert len(body) <= MESSAGE_BYTES_MAX, "no peer accepts a message of this size"
    return _LENGTH.pack(len(body)) + body


class FrameConnection(asyncio.Protocol, Generic[M]):
    """One end of a connection.

    Before `start` the connection reads at most once; the rest waits in the kernel.
    """

    def __init__(
        self,
        message_type: type[M],
        *,
        is_opener: bool,
        on_connected: "Callable[[FrameConnection[M]], None] | None" = None,
    ) -> None:
        """`message_type`: what the peer sends. `on_connected`: called once the connection is established."""
        self._on_connected = on_connected
        self._decode = message_type.FromString
        self._is_opener = is_opener
        self._expected = b"" if is_opener else PREAMBLE  # The part of the preamble that has not arrived yet.
        self._on_messages: Callable[[Sequence[M]], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._on_lost: Callable[[Failure], None] | None = None
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()  # The beginning of a frame of at least `_unread_min` bytes.
        self._unread_min = 0
        self._is_over = False
        self._failure: Failure | None = None  # Why the connection was lost.
        self.is_writable = True

    @property
    def peer(self) -> str:
        """The address of the peer, for logs."""
        assert self._transport is not None
        name = self._transport.get_extra_info("peername") or ("unknown",)
        return ":".join(str(part) for part in name[:2])

    @property
    def descriptor(self) -> int:
        """The file descriptor of the connection."""
        assert self._transport is not None
        number: int = self._transport.get_extra_info("socket").fileno()
        return number

    def start(
        self,
        *,
        on_messages: Callable[[Sequence[M]], None],
        on_writable: Callable[[], None],
        on_lost: Callable[[Failure], None],
    ) -> None:
        """Begin to deliver messages, first those that have arrived already. Call it once.

        The callbacks run on the event loop and must not raise. `on_messages`: gets the messages of one read, in order.
        `on_writable`: the peer has read nearly everything that was sent, after `is_writable` was False. `on_lost`: the
        connection is closed, by DISCONNECTED, or PROTOCOL_VIOLATION if the peer sent something that cannot be read.
        """
        self._on_messages, self._on_writable, self._on_lost = on_messages, on_writable, on_lost
        if self._failure is not None:
            on_lost(self._failure)
        self.data_received(b"")
        self.resume()

    def send(self, message: Message) -> None:
        """Send the message, in order. Check `is_writable` first: `send` buffers without a bound."""
        if self._is_over or self._transport is None:
            return
        self._transport.write(framed(message))

    def pause_for(self, delay_s: float) -> None:
        """Stop reading for `delay_s`: what the peer sends waits in the kernel."""
        self.pause()
        asyncio.get_running_loop().call_later(delay_s, self.resume)

    def pause(self) -> None:
        """Stop reading until `resume`: what the peer sends waits in the kernel. Idempotent."""
        if self._transport is not None and not self._is_over:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again. Idempotent."""
        if self._transport is not None and not self._is_over:
            self._transport.resume_reading()

    def close(self) -> None:
        """Send what is buffered and hang up. No callback is called afterwards. Idempotent."""
        self._is_over = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Hang up at once and drop what is buffered. No callback is called afterwards. Idempotent."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of it.
        if self._is_opener:
            self._transport.write(PREAMBLE)
        if self._on_connected is not None:
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._on_messages is None:  # uvloop reads before the caller of `create_connection` resumes.
            self._unread += data
            self.pause()
            return
        if self._unread:
            self._unread += data
            if len(self._unread) < self._unread_min:
                return
            data = bytes(self._unread)
        messages: list[M] = []
        failure = self._split(data, messages)
        if messages:
            self._on_messages(messages)
        if failure is not None:
            self._fail(failure)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._on_writable is not None and not self._is_over:
            self._on_writable()

    def eof_received(self) -> None:
        """The peer has closed its direction. The connection ends at once: the peer may never read what is buffered."""
        self._fail(Failure(Reason.DISCONNECTED, "the peer hung up"))

    def connection_lost(self, exc: Exception | None) -> None:
        why = "the connection was closed" if exc is None else why_failed(exc)
        self._fail(Failure(Reason.DISCONNECTED, why))

    # Frames

    def _split(self, data: bytes, messages: list[M]) -> Failure | None:
        """Append all complete messages to `messages` and keep the rest. Returns a failure if the peer breaks the rules.

        This is one function because it runs for every step, and for very many in a process that was suspended.
        """
        start, size, end = self._skip_preamble(data) if self._expected else 0, _LENGTH.size, len(data)
        if start is None:
            why = (
                SPEAKS_TLS if data.startswith(TLS_HANDSHAKE) else "it does not begin as a session of this version does"
            )
            return Failure(Reason.PROTOCOL_VIOLATION, why)
        while end - start >= size:
            (length,) = _LENGTH.unpack_from(data, start)
            if length > MESSAGE_BYTES_MAX:
                why = f"a message of {length} bytes: at most {MESSAGE_BYTES_MAX}"
                return Failure(Reason.PROTOCOL_VIOLATION, why)
            size = _LENGTH.size + length
            if start + size > end:
                break
            try:
                messages.append(self._decode(data[start + _LENGTH.size : start + size]))
            except DecodeError:
                return Failure(Reason.PROTOCOL_VIOLATION, "a message cannot be decoded")
            start, size = start + size, _LENGTH.size
        self._unread, self._unread_min = bytearray(data[start:]), size
        return None

    def _skip_preamble(self, data: bytes) -> int | None:
        """Return where the frames begin, as far as the preamble has arrived; None if it is not the preamble."""
        arrived = data[: len(self._expected)]
        if not self._expected.startswith(arrived):
            return None
        self._expected = self._expected[len(arrived) :]
        return len(arrived)

    def _fail(self, failure: Failure) -> None:
        """The connection is over, because the peer ended it or broke the protocol."""
        if self._is_over:
            return
        self._failure = failure
        self.abort()
        if self._on_lost is not None:
            self._on_lost(failure)
