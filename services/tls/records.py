"""The TLS of one connection, without its network: OpenSSL with two buffers in memory."""

import ssl
from contextlib import suppress

RECORD_BYTES = 16 * 1024
"""The content of one record at most. Source: RFC 8446, section 5.1."""
IDLE_BYTES_MAX = 64 * 1024
"""What a peer may send between two pieces of data: new keys, alerts, the beginning of a record."""


class Records:
    """Encrypts and decrypts. `tls`: knows the peer's certificate and what was agreed on."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        self._idle_size = 0

    @property
    def pending_size(self) -> int:
        """The size of what TLS itself has to say."""
        return self._outgoing.pending

    def pending(self) -> bytes:
        """What TLS itself has to say, to be sent at once: answers, alerts."""
        return self._outgoing.read()

    def do_handshake(self, flight: bytes | bytearray) -> bool:
        """Go on with the handshake. Returns whether it is complete. Raises SSLError."""
        self._incoming.write(flight)
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, data: bytes) -> bytes:
        """What must be sent for `data`, with what is pending."""
        view, sent = data, 0
        while sent < len(data):
            sent += self.tls.write(view)
            view = data[sent:]
        return self._outgoing.read()

    def decrypt(self, data: bytes, chunks: list[bytes]) -> Exception | None:
        """Append what the peer has sent. Returns why no more can be read; SSLZeroReturnError: its direction has ended.

        With empty `data`: what has come with the end of the handshake.
        """
        view = memoryview(data)
        for start in range(0, max(len(data), 1), RECORD_BYTES):
            if (failure := self._decrypt(view[start : start + RECORD_BYTES], chunks)) is not None:
                return failure
        return None

    def _decrypt(self, data: memoryview, chunks: list[bytes]) -> Exception | None:
        self._incoming.write(data)
        count = len(chunks)
        try:
            while chunk := self.tls.read(RECORD_BYTES):
                chunks.append(chunk)
            return ssl.SSLZeroReturnError()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            return error
        self._idle_size = 0 if len(chunks) > count else self._idle_size + len(data)
        return too_much_overhead() if self._idle_size > IDLE_BYTES_MAX else None

    def closing(self) -> bytes:
        """What tells the peer that no more comes. What it sends can still be read."""
        with suppress(ssl.SSLError):  # Raised as the peer's own end has not come.
            self.tls.unwrap()
        return self._outgoing.read()


def too_much_overhead() -> ssl.SSLError:
    """The peer has passed a bound of what is no data."""
    return ssl.SSLError(ssl.SSL_ERROR_SSL, "it sends much that is no data")
