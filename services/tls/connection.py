"""TLS on a TCP connection, for protocols that know nothing of it.

asyncio has this, too. But there a transport reports only what waits in the TLS layer, not what waits below it; cannot
close one direction; and encrypts later than the write. Bounds of slow clients, and the wait for the end of an answer,
would be wrong. Here every write is encrypted at once and passed down, so the TCP transport's buffer, its limits and its
callbacks are those of the connection; and what one read brings is delivered in one call.

| state | event | next | what happens |
| --- | --- | --- | --- |
| handshake | the handshake is complete, and the peer may come in | open | the inner protocol is made and told |
| handshake | it fails, the peer may not come in, does not speak TLS, or leaves | closed | `on_failed` is called |
| handshake | HANDSHAKE_S_MAX is over, or more than HANDSHAKES_MAX are under way | closed | `on_failed` is called |
| open | data | open | it is delivered |
| open | the peer ends its direction | open or closed | `eof_received` decides, as over TCP |
| open | `close`, `abort` | closed | as over TCP |
| open | the peer breaks TLS, or sends much that is no data | closed | as over TCP after a reset |
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, cast

from services.tls.handshakes import Handshakes
from services.tls.records import Records, too_much_overhead

FLIGHT_BYTES_MAX = 32 * 1024
"""What a peer may send for its handshake, certificates and all. One read more may wait for the step that counts it."""
REPLY_BYTES_MAX = 4 * 1024
"""What the TLS layer itself may have to say to a peer that reads nothing, such as answers to new keys."""
HANDSHAKE, ALERT = 22, 21
"""The types of record with which a peer that speaks TLS may begin. Source: RFC 8446, section 5.1."""


class PlainPeer(Exception):
    """The peer does not speak TLS."""


class Refused(Exception):
    """The handshake is complete, but the peer may not come in. `parting`: what it is sent before the end."""

    def __init__(self, why: str, parting: bytes = b"") -> None:
        super().__init__(why)
        self.parting = parting


class TlsConnection(asyncio.Protocol):
    """The protocol of a TCP connection that carries TLS. It makes the inner protocol once the handshake is complete."""

    def __init__(
        self,
        make_inner: Callable[[ssl.SSLObject], asyncio.BaseProtocol],
        context: ssl.SSLContext,
        handshakes: Handshakes,
        *,
        on_failed: Callable[["TlsConnection", Exception], None],
        is_server: bool = True,
        plain_reply: bytes = b"",
    ) -> None:
        """`make_inner`: gets the peer's certificates; raises Refused if the peer may not come in.

        `on_failed`: called when the handshake failed, with SSLError, PlainPeer, Refused or OSError. `plain_reply`: what
        a peer is sent that does not speak TLS.
        """
        self._make_inner = make_inner
        self._handshakes = handshakes
        self._on_failed = on_failed
        self._plain_reply = plain_reply
        self._is_server = is_server
        self._records = Records(context, is_server=is_server)
        self.inner: Any = None  # An asyncio.Protocol, once the handshake is complete and until the connection is lost.
        self.tcp: asyncio.Transport
        self._flight = bytearray()  # The bytes of the handshake that the next step handles.
        self._flight_size = 0
        self._is_step_due = self._is_over = self._has_peer_ended = False
        self.is_closing = self.has_ended = False  # By the inner protocol, or as TLS is broken.
        self._reply_size = 0
        self._is_tcp_ended = False  # During the handshake.
        self._stays_open = False  # After the peer's end.
        self._error: Exception | None = None  # Why the connection is aborted.

    @property
    def tls(self) -> ssl.SSLObject:
        """Knows the peer's certificate, and what was agreed on."""
        return self._records.tls

    @property
    def peer(self) -> str:
        """The address of the peer, for logs."""
        return _text(self.tcp.get_extra_info("peername"))

    @property
    def address(self) -> str:
        """The address of this end, for logs."""
        return _text(self.tcp.get_extra_info("sockname"))

    # Callbacks of the TCP transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.tcp = cast("asyncio.Transport", transport)  # uvloop's transports are not of asyncio's class.
        self._handshakes.begin(self)
        if not self._is_server:
            self._step_soon()

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._has_peer_ended:
            return  # OpenSSL would keep what comes after the end, and never read it.
        if self.inner is not None:
            self._receive(data)
            return
        if not self._flight_size and data[0] not in (HANDSHAKE, ALERT):
            self._refuse(PlainPeer("it does not speak TLS"), self._plain_reply)
            return
        self._flight += data
        self._flight_size += len(data)
        if self._flight_size > FLIGHT_BYTES_MAX:
            self.tcp.pause_reading()  # Data may follow the handshake at once: it waits for the step.
        self._step_soon()

    def pause_writing(self) -> None:
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self.inner is not None:
            self.inner.resume_writing()

    def eof_received(self) -> bool:
        if self.inner is not None:
            return self._end()
        if self._is_step_due and not self._is_over:
            self._is_tcp_ended = True  # What the step handles may be the end of the handshake, and a request.
            return True
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self.inner is not None:
            self._is_over = True
            inner, self.inner = self.inner, None  # Breaks a reference cycle: connection, protocol, transport.
            inner.connection_lost(self._error or exc)
        elif not self._is_over:
            self._leave()

    # The handshake

    def _step_soon(self) -> None:
        if not self._is_step_due:
            self._is_step_due = True
            self._handshakes.step(self._step)

    def _step(self) -> None:
        self._is_step_due = False
        if self._is_over:
            return
        flight, self._flight = self._flight, bytearray()
        try:
            is_complete = self._records.do_handshake(flight)
        except ssl.SSLError as error:
            self._refuse(error, self._records.pending())  # The alert that says why.
            return
        if is_complete:
            try:
                self._open()
            except BaseException:
                self.tcp.abort()  # As transports do when `data_received` raises.
                raise
        elif self._flight_size > FLIGHT_BYTES_MAX:
            self._fail(ssl.SSLError(ssl.SSL_ERROR_SSL, f"its handshake is longer than {FLIGHT_BYTES_MAX} bytes"))
        elif self._is_tcp_ended:
            self._leave()
        else:
            self._send_pending()

    def _open(self) -> None:
        """The handshake is complete. Over TLS 1.3 a server may still refuse a client's certificate: see `_receive`."""
        self._send_pending()
        try:
            inner = self._make_inner(self.tls)
        except Refused as refused:
            parting = self._records.encrypt(refused.parting)
            self._refuse(refused, parting + self._records.closing())
            return
        self._handshakes.end(self)
        self.inner = inner
        self._flight_size = 0
        self.tcp.resume_reading()
        inner.connection_made(TlsTransport(self))
        self._receive(b"")
        if self._is_tcp_ended and self._error is None and not self._end():
            self.close()

    def expire(self, why: str) -> None:
        """See PendingHandshake."""
        self._fail(TimeoutError(why))

    def _leave(self) -> None:
        """The peer has hung up. Some clients say only so that they do not accept the server's certificate."""
        if self._flight_size:
            self._fail(
                ssl.SSLError(
                    ssl.SSL_ERROR_SSL, "it hung up during the handshake: it may not accept this process's certificate"
                )
            )
        else:
            self._fail(ConnectionResetError("it hung up before the handshake"))

    def _refuse(self, error: Exception, parting: bytes) -> None:
        if parting:
            self.tcp.write(parting)
        self._fail(error, is_polite=True)

    def _fail(self, error: Exception, *, is_polite: bool = False) -> None:
        """The connection ends without an inner protocol. `is_polite`: what was written is sent before."""
        if self._is_over:
            return
        self._is_over = True
        self._handshakes.end(self)
        if is_polite:
            self.tcp.close()
        else:
            self.tcp.abort()
        self._on_failed(self, error)
        self._handshakes.on_ended()

    # Receiving

    def _receive(self, data: bytes) -> None:
        """Deliver what the data holds."""
        chunks: list[bytes] = []
        error = self._records.decrypt(data, chunks)
        if self._records.pending_size and not self._reply():
            error = error or too_much_overhead()
        has_ended = isinstance(error, ssl.SSLZeroReturnError)
        if error is not None and not has_ended:
            self._error, self.is_closing = error, True  # Nothing can be written: OpenSSL would raise.
        if chunks:
            self.inner.data_received(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if self._error is not None:
            self._send_pending()  # The alert that says why.
            self.tcp.abort()
        elif has_ended and not self._is_over and not self._end():
            self.close()

    def _reply(self) -> bool:
        """Send what TLS itself has to say. Returns whether the peer takes it."""
        if not self.tcp.get_write_buffer_size():
            self._reply_size = 0
        self._reply_size += self._records.pending_size
        self._send_pending()
        return self._reply_size <= REPLY_BYTES_MAX

    def _end(self) -> bool:
        """The peer has ended its direction, by TLS or by TCP. Returns whether the inner protocol goes on."""
        if not self._has_peer_ended and not self._is_over:
            self._has_peer_ended = True
            self._stays_open = bool(self.inner.eof_received())
        return self._stays_open

    # Sending, for TlsTransport

    def send(self, data: bytes) -> None:
        """Encrypt and send."""
        self.tcp.write(self._records.encrypt(data))

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes. Idempotent."""
        if not self.has_ended:
            self.has_ended = True
            self.tcp.write(self._records.closing())

    def close(self) -> None:
        """Send what is buffered, and hang up."""
        self.is_closing = True
        self.end_sending()
        self.tcp.close()

    def _send_pending(self) -> None:
        if self._records.pending_size and not self.tcp.is_closing():
            self.tcp.write(self._records.pending())


class TlsTransport(asyncio.Transport):
    """What the inner protocol sees. Sizes and limits of buffers are those of the TCP transport: of encrypted bytes."""

    def __init__(self, connection: TlsConnection) -> None:
        super().__init__()
        self._connection = connection

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "ssl_object":
            return self._connection.tls
        return self._connection.tcp.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._connection.inner = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast("asyncio.BaseProtocol", self._connection.inner)

    def is_closing(self) -> bool:
        return self._connection.is_closing or self._connection.tcp.is_closing()

    def write(self, data: Any) -> None:
        if not self._connection.has_ended and not self.is_closing():
            self._connection.send(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._connection.has_ended and not self.is_closing():
            self._connection.end_sending()
            self._connection.tcp.write_eof()

    def close(self) -> None:
        if not self.is_closing():
            self._connection.close()

    def abort(self) -> None:
        self._connection.is_closing = True
        self._connection.tcp.abort()

    def pause_reading(self) -> None:
        self._connection.tcp.pause_reading()

    def resume_reading(self) -> None:
        self._connection.tcp.resume_reading()

    def is_reading(self) -> bool:
        return self._connection.tcp.is_reading()

    def get_write_buffer_size(self) -> int:
        return self._connection.tcp.get_write_buffer_size()

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._connection.tcp.get_write_buffer_limits()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._connection.tcp.set_write_buffer_limits(high, low)


def _text(address: Any) -> str:
    return ":".join(str(part) for part in address[:2]) if isinstance(address, tuple) else "unknown"
