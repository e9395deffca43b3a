"""Protobuf messages as frames on a TCP connection: how a session between frontend and worker travels.

    connection = preamble frame*        the preamble from whoever opened it, and only from there
    frame      = length message         length: 4 bytes, big-endian, of the message; at most MESSAGE_BYTES_MAX

Not an rpc, for what an rpc costs: grpc.aio hands each message from a thread of its own to the loop, and that wake-up
takes longer than all the tokens of a small step. Here a message is one read and a plain call, and several that have
come in the meantime are one read and one call as well.
"""

import asyncio
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Generic, Protocol, TypeVar, cast

from google.protobuf.message import DecodeError, Message

from services.core.errors import Failure, Reason
from services.rpc.status import MESSAGE_BYTES_MAX

M = TypeVar("M", bound=Message)
M_contra = TypeVar("M_contra", bound=Message, contravariant=True)

PREAMBLE = b"unbroken.v1.Session\n"
"""Who says something else is no frontend, or one of another version."""
_LENGTH = Struct(">I")


class Receiver(Protocol[M_contra]):
    """Whom a connection calls, from the loop. It must not raise."""

    def on_messages(self, messages: Sequence[M_contra]) -> None:
        """Those that one read brought, in order."""

    def on_writable(self) -> None:
        """What was sent has left, or nearly all of it."""

    def on_lost(self, failure: Failure) -> None:
        """The connection is over, and closed: DISCONNECTED, or PROTOCOL_VIOLATION for what can't be read."""


class FrameConnection(asyncio.Protocol, Generic[M]):
    """One end of a connection.

    Until `start` has given it its receiver it reads once at most: the rest waits in the kernel.
    """

    def __init__(
        self,
        message_type: type[M],
        *,
        is_opener: bool,
        on_made: "Callable[[FrameConnection[M]], None] | None" = None,
    ) -> None:
        """message_type: what the other end sends. on_made: called once it is connected."""
        self._on_made = on_made
        self._decode = message_type.FromString
        self._is_opener = is_opener
        self._awaited = b"" if is_opener else PREAMBLE
        self._receiver: Receiver[M] | None = None
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()  # The beginning of a frame, of so many bytes at least.
        self._unread_min = 0
        self._is_over = False
        self._failure: Failure | None = None  # What it was lost by.
        self.is_writable = True

    @property
    def peer(self) -> str:
        """The other end's address, for people."""
        assert self._transport is not None
        name = self._transport.get_extra_info("peername") or ("unknown",)
        return ":".join(str(part) for part in name[:2])

    def start(self, receiver: Receiver[M]) -> None:
        """Hand what comes, and what has come already, to the receiver. Once."""
        self._receiver = receiver
        if self._failure is not None:
            receiver.on_lost(self._failure)
        self.data_received(b"")
        self.go_on()

    def send(self, message: Message) -> None:
        """In order, at once. Who sends much looks at `is_writable` before, or it gathers here without a bound."""
        if self._is_over or self._transport is None:
            return
        body = message.SerializeToString()
        assert len(body) <= MESSAGE_BYTES_MAX, "a message that nobody would take"
        self._transport.write(_LENGTH.pack(len(body)) + body)

    def rest(self, delay_s: float) -> None:
        """Leave what comes in the kernel for so long."""
        self.pause()
        asyncio.get_running_loop().call_later(delay_s, self.go_on)

    def pause(self) -> None:
        """Leave what comes in the kernel until `go_on`. Idempotent."""
        if self._transport is not None and not self._is_over:
            self._transport.pause_reading()

    def go_on(self) -> None:
        """Read again. Idempotent."""
        if self._transport is not None and not self._is_over:
            self._transport.resume_reading()

    def close(self) -> None:
        """Send what is left and hang up. The receiver hears nothing more. Idempotent."""
        self._is_over = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Hang up at once, whatever is unsent. The receiver hears nothing more. Idempotent."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    # What the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no instances of it.
        if self._is_opener:
            self._transport.write(PREAMBLE)
        if self._on_made is not None:
            self._on_made(self)

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        if self._receiver is None:  # uvloop reads before whoever awaits the connection knows that it is made.
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
            self._receiver.on_messages(messages)
        if failure is not None:
            self._fail(failure)

    def pause_writing(self) -> None:
        self.is_writable = False

    def resume_writing(self) -> None:
        self.is_writable = True
        if self._receiver is not None and not self._is_over:
            self._receiver.on_writable()

    def eof_received(self) -> None:
        """Whoever sends no more has hung up. At once: what it does not read any more would never leave."""
        self._fail(Failure(Reason.DISCONNECTED, "the other end hung up"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Failure(Reason.DISCONNECTED, str(exc or "it was closed")))

    # Frames

    def _split(self, data: bytes, messages: list[M]) -> Failure | None:
        """Add all whole messages up to one that breaks the rules, and say how, if one does; what follows is kept.

        In one function, for this is what each step costs, most of all in a process that has slept meanwhile.
        """
        start, size, end = self._skip_preamble(data) if self._awaited else 0, _LENGTH.size, len(data)
        if start is None:
            return Failure(Reason.PROTOCOL_VIOLATION, "it does not begin as a session of this version does")
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
                return Failure(Reason.PROTOCOL_VIOLATION, "a message can't be decoded")
            start, size = start + size, _LENGTH.size
        self._unread, self._unread_min = bytearray(data[start:]), size
        return None

    def _skip_preamble(self, data: bytes) -> int | None:
        """Where the frames begin, as far as they have come; None if it is not the preamble."""
        came = data[: len(self._awaited)]
        if not self._awaited.startswith(came):
            return None
        self._awaited = self._awaited[len(came) :]
        return len(came)

    def _fail(self, failure: Failure) -> None:
        """The connection is over, by the other end or for what it sent."""
        if self._is_over:
            return
        self._failure = failure
        self.abort()
        if self._receiver is not None:
            self._receiver.on_lost(failure)
