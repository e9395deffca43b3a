"""Certificates for tests, and a client over TLS whose every byte a test decides."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from services.tls.certificate import PairFiles, server_context
from services.tls.connection import TlsConnection
from services.tls.handshakes import Handshakes
from services.tls.issue import Authority, authority_in, host_name, issue, uri_name, write_pair
from services.tls.peers import PeerFiles, Peers
from services.tls.roles import Role

READ_BYTES = 64 * 1024


class Certificates:
    """A CA of its own, and the certificates that it has made, in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority: Authority = authority_in(folder)[0]
        self.ca = folder / "ca.pem"

    def pair(
        self,
        name: str = "edge",
        *,
        hosts: Sequence[str] = ("localhost", "127.0.0.1"),
        uris: Sequence[str] = (),
        days: float = 1,
        ago: timedelta = timedelta(),
        is_client: bool = False,
    ) -> PairFiles:
        """Make a certificate, or make it anew. `ago`: how long before now it was made."""
        names = [*map(uri_name, uris), *map(host_name, hosts)]
        now = datetime.now(UTC) - ago
        made = issue(self.authority, name, names, days=days, is_client=is_client, now=now)
        write_pair(self.folder, name, *made)
        return PairFiles(self.folder / f"{name}.pem", self.folder / f"{name}.key")

    def client_context(self) -> ssl.SSLContext:
        """For clients that trust this CA."""
        return ssl.create_default_context(cafile=str(self.ca))


def serial_of(context: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """The serial number of the certificate that a server's context shows to a client."""
    from services.tls.certificate import peer_of

    client.check_hostname = False
    return str(peer_of(client, context)["serialNumber"])


class Recorder(asyncio.Protocol):
    """Records what a server's protocol is told. `goes_on`: what `eof_received` returns."""

    def __init__(self, *, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        self.transport: Any = None
        self.reads: list[bytes] = []
        self.has_end = self.is_lost = False
        self.error: Exception | None = None
        self.is_full = False

    @property
    def received(self) -> bytes:
        return b"".join(self.reads)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.reads.append(data)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False

    def eof_received(self) -> bool:
        self.has_end = True
        return self.goes_on

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost, self.error = True, exc


class Server:
    """A server that gives each connection a Recorder, or what `make_inner` returns."""

    def __init__(self, context: ssl.SSLContext, port: int, handshakes: Handshakes) -> None:
        self.context = context
        self.port = port
        self.handshakes = handshakes
        self.inner: list[Recorder] = []
        self.failures: list[Exception] = []
        self.connections: list[TlsConnection] = []

    async def first(self) -> Recorder:
        """The protocol of the first connection, once its handshake is complete."""
        await until(lambda: bool(self.inner))
        return self.inner[0]


@asynccontextmanager
async def serving(
    context: ssl.SSLContext, *, make_inner: Callable[[ssl.SSLObject], Recorder] | None = None, reply: bytes = b""
) -> AsyncIterator[Server]:
    """Serve on a free port."""
    loop = asyncio.get_running_loop()
    server = Server(context, 0, Handshakes())

    def inner(peer: ssl.SSLObject) -> asyncio.BaseProtocol:
        server.inner.append(Recorder() if make_inner is None else make_inner(peer))
        return server.inner[-1]

    def make() -> TlsConnection:
        made = TlsConnection(
            inner,
            server.context,
            server.handshakes,
            on_failed=lambda _, error: server.failures.append(error),
            plain_reply=reply,
        )
        server.connections.append(made)
        return made

    listening = await loop.create_server(make, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()
        server.handshakes.close()
        for one in server.inner:
            if one.transport is not None:
                one.transport.abort()


class Client:
    """A client over TCP whose TLS the test drives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, context: ssl.SSLContext) -> None:
        self.reader, self.writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def shake(self, *, flushes_last: bool = True) -> None:
        """Complete the handshake. `flushes_last`: send its last flight at once. Raises SSLError."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                await self.fill()
            else:
                if flushes_last:
                    self.flush()
                return

    def flush(self, more: bytes = b"") -> None:
        """Send what TLS has to say, and `more` in the same segment."""
        self.writer.write(self._out.read() + more)

    async def fill(self) -> None:
        """Read some bytes. Raises EOFError at the end of the TCP connection."""
        if not (data := await self.reader.read(READ_BYTES)):
            raise EOFError
        self._in.write(data)

    def send(self, data: bytes) -> None:
        self.tls.write(data)
        self.flush()

    async def read(self, size: int) -> bytes:
        """Read until `size` bytes have come, or the server has said that there are no more."""
        found = b""
        while len(found) < size:
            try:
                if not (chunk := self.tls.read(size - len(found))):
                    break
                found += chunk
            except ssl.SSLZeroReturnError:
                break
            except ssl.SSLWantReadError:
                await self.fill()
        return found

    def end(self) -> None:
        """Say that no more comes, and keep reading."""
        with suppress(ssl.SSLError):
            self.tls.unwrap()
        self.flush()


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext, *, shakes: bool = True) -> AsyncIterator[Client]:
    """A client, whose handshake is complete unless `shakes` is False."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer, context)
    try:
        if shakes:
            await client.shake()
        yield client
    finally:
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition. The test as a whole has a bound."""
    while not condition():
        await asyncio.sleep(0.001)


def reasons_in(lines: Iterable[Any]) -> list[str]:
    """Why peers were refused, as captured lines of a log say."""
    return [line["why"] for line in lines if "why" in line]


@cache
def shared_certificates() -> Certificates:
    """One CA for all tests of a process that need nothing special."""
    import tempfile

    return Certificates(Path(tempfile.mkdtemp(prefix="unbroken-tls-")))


def shared_context() -> ssl.SSLContext:
    """A server's context with a certificate for localhost."""
    return server_context(shared_certificates().pair())


def peer_files(
    made: Certificates,
    role: str,
    *,
    name: str = "",
    domain: str = "plane.test",
    days: float = 1,
    ago: timedelta = timedelta(),
) -> PeerFiles:
    """The certificate of a process of this role. `name`: of its files."""
    pair = made.pair(
        name or role,
        uris=[f"spiffe://{domain}/{role}"],
        hosts=[f"{role}.{domain}"],
        is_client=True,
        days=days,
        ago=ago,
    )
    return PeerFiles(pair.cert, pair.key, made.ca)


def peers_of(made: Certificates, role: Role, **more: Any) -> Peers:
    """A process of this role."""
    return Peers(peer_files(made, role, **more), role, time.time)


def unchecked_peers(
    made: Certificates, role: Role, shown_role: Role, authority: Certificates | None = None, **more: Any
) -> Peers:
    """A process of this role that shows another certificate. `authority`: that made it; `more`: see `peer_files`."""
    peers = peers_of(made, role)
    shown = peer_files(authority or made, shown_role, name="shown", **more)
    pair = peers.files.loaded
    for context in (pair.context, pair.client):
        context.load_cert_chain(shown.cert, shown.key)
    pem = (pair.pem[0], shown.key.read_bytes(), shown.cert.read_bytes())
    peers.files.loaded = replace(pair, pem=pem)
    return peers
