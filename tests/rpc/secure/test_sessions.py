"""A session over TLS is one between a frontend and a worker of the same plane; every other peer is told why not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.errors import Failure
from services.rpc.framing import FrameConnection
from services.rpc.secure.sessions import NEEDS_TLS, connect
from services.stubs import worker_pb2
from services.tls.peers import Peers
from services.tls.roles import Role
from services.worker.listener import Connection, SessionListener
from tests.support.doubles import run_async
from tests.tls.support import Certificates, peers_of, reasons_in, unchecked_peers, until


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


@asynccontextmanager
async def listening(peers: Peers | None) -> AsyncIterator[int]:
    """A worker that greets each frontend, and waits until it hangs up. Yields its port."""

    async def attach(connection: Connection) -> None:
        over = asyncio.Event()
        connection.start(on_messages=lambda _: None, on_writable=lambda: None, on_lost=lambda _: over.set())
        connection.send(worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(instance_id="w")))
        await over.wait()

    async with SessionListener(attach, peers) as listener:
        yield int((await listener.start("127.0.0.1:0")).rpartition(":")[2])


class Frontend:
    """What a frontend hears on its connection."""

    def __init__(self) -> None:
        self.messages: list[worker_pb2.WorkerMessage] = []
        self.lost: Failure | None = None
        self.connection: FrameConnection[worker_pb2.WorkerMessage] = FrameConnection(
            worker_pb2.WorkerMessage, is_opener=True
        )

    async def connect(self, port: int, peers: Peers | None) -> None:
        await connect(self.connection, "127.0.0.1", port, peers)
        self.connection.start(on_messages=self.messages.extend, on_writable=lambda: None, on_lost=self._on_lost)
        await until(lambda: bool(self.messages or self.lost))

    def _on_lost(self, failure: Failure) -> None:
        self.lost = failure


def outcome(worker: Peers | None, frontend: Peers | None, *, is_logged: bool = False) -> tuple[str, list[str]]:
    """What the frontend hears first, or why it hears nothing; and what the worker logs.

    `is_logged`: the worker logs something, maybe after the frontend has heard.
    """

    async def scenario(lines: list[Any]) -> str:
        one = Frontend()
        async with listening(worker) as port:
            try:
                await one.connect(port, frontend)
                if one.messages:
                    return one.messages[0].refusal or one.messages[0].welcome.instance_id
                assert one.lost is not None
                return one.lost.detail
            except Failure as failure:
                return f"{failure.reason}: {failure.detail}"
            finally:
                one.connection.abort()
                await until(lambda: not is_logged or bool(reasons_in(lines)))

    with capture_logs() as lines:
        heard = run_async(scenario(lines))
    return heard, reasons_in(lines)


def test_frontend_and_worker_of_one_plane_talk(made: Certificates) -> None:
    assert outcome(peers_of(made, Role.WORKER), peers_of(made, Role.FRONTEND)) == ("w", [])


def test_client_of_another_role_is_refused_on_both_sides(made: Certificates) -> None:
    why = "the peer is spiffe://plane.test/registry, and sessions with workers are for the role frontend"
    intruder = unchecked_peers(made, Role.FRONTEND, Role.REGISTRY)

    assert outcome(peers_of(made, Role.WORKER), intruder, is_logged=True) == (why, [why])


def test_client_of_another_domain_is_refused_on_both_sides(made: Certificates) -> None:
    intruder = unchecked_peers(made, Role.FRONTEND, Role.FRONTEND, domain="other.test")

    heard, logged = outcome(peers_of(made, Role.WORKER), intruder, is_logged=True)

    other, this = "spiffe://other.test/frontend", "spiffe://plane.test/worker"
    assert heard == f"the peer is {other}, of another domain than this process, {this}"
    assert logged == [heard]


def test_client_of_another_ca_is_refused_on_both_sides(made: Certificates, tmp_path: Path) -> None:
    other = Certificates(tmp_path / "other")
    intruder = unchecked_peers(made, Role.FRONTEND, Role.FRONTEND, other)

    heard, logged = outcome(peers_of(made, Role.WORKER), intruder, is_logged=True)

    assert heard == "the peer does not accept the certificate of this process: it is not from the peer's CA"
    assert logged == ["the peer's certificate is not accepted: it is not from the CA that this process trusts"]


def test_expired_client_is_refused_on_both_sides(made: Certificates) -> None:
    intruder = unchecked_peers(made, Role.FRONTEND, Role.FRONTEND, ago=timedelta(days=5))

    heard, logged = outcome(peers_of(made, Role.WORKER), intruder, is_logged=True)

    assert heard == "the peer does not accept the certificate of this process: it has expired"
    assert logged == ["the peer's certificate is not accepted: it has expired: have a new one made"]


def test_server_of_another_role_is_no_worker(made: Certificates) -> None:
    impostor = unchecked_peers(made, Role.WORKER, Role.REGISTRY)

    heard, _ = outcome(impostor, peers_of(made, Role.FRONTEND))

    why = "the peer is spiffe://plane.test/registry, and this process looks for the role worker"
    assert heard == f"CANNOT_CONNECT: TLS with the worker failed: {why}"


@pytest.mark.parametrize("days", [1, 5])
def test_server_that_is_not_trusted_is_refused_on_both_sides(made: Certificates, tmp_path: Path, days: int) -> None:
    """Of another CA, or expired."""
    authority = Certificates(tmp_path / "other") if days == 1 else made
    ago = timedelta(days=days - 1)
    worker = unchecked_peers(made, Role.WORKER, Role.WORKER, authority, ago=ago)

    heard, logged = outcome(worker, peers_of(made, Role.FRONTEND), is_logged=True)

    ours, theirs = (
        ("it is not from the CA that this process trusts", "it is not from the peer's CA")
        if days == 1
        else ("it has expired: have a new one made", "it has expired")
    )
    assert heard == f"CANNOT_CONNECT: TLS with the worker failed: the peer's certificate is not accepted: {ours}"
    assert logged == [f"the peer does not accept the certificate of this process: {theirs}"]


def test_session_without_tls_is_refused_where_tls_is_required(made: Certificates) -> None:
    assert outcome(peers_of(made, Role.WORKER), None, is_logged=True) == (NEEDS_TLS, ["the peer does not speak TLS"])


def test_session_over_tls_is_refused_where_there_is_none(made: Certificates) -> None:
    heard, _ = outcome(None, peers_of(made, Role.FRONTEND))

    assert heard == "CANNOT_CONNECT: TLS with the worker failed: the peer does not speak TLS"


def test_waiting_for_a_handshake_can_be_cancelled(made: Certificates) -> None:
    async def scenario() -> None:
        lost = asyncio.Event()

        class Silent(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:
                lost.set()

        server = await asyncio.get_running_loop().create_server(Silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await Frontend().connect(port, peers_of(made, Role.FRONTEND))
        await lost.wait()
        server.close()

    run_async(scenario())
