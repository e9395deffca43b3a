"""An rpc between processes of the plane: its caller's role must be in the table, and its server's role is verified."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from services.http.grpc.routes import GrpcRoutes
from services.http.rpc_server import rpc_server
from services.registry.memory_store import MemoryStore
from services.registry.service import RegistryService
from services.rpc.secure.channels import open_channel, why_refused
from services.stubs import registry_pb2, registry_pb2_grpc
from services.tls.peers import Peers
from services.tls.roles import EVERY_ROLE, Role
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.tls.support import Certificates, peers_of, reasons_in, unchecked_peers, until


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


def ask(
    server: Peers | None, client: Peers | None, *, is_logged: bool = False
) -> tuple[grpc.StatusCode, str, list[str]]:
    """Ask a registry to drain a worker that it does not know. Returns the status, why, and what the server logs.

    `is_logged`: the server logs something, maybe after the client has its answer.
    """

    async def scenario(lines: list[Any]) -> tuple[grpc.StatusCode, str]:
        store, rpcs = MemoryStore(), GrpcRoutes(peers=server)
        rpcs.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryService(store))
        keeping = asyncio.create_task(store.run())
        tls = None if server is None else server.door(EVERY_ROLE)
        async with (
            rpc_server(rpcs, "127.0.0.1:0", tls) as serving,
            open_channel(serving.addresses[0], client, Role.REGISTRY) as channel,
        ):
            request = registry_pb2.DrainRequest(instance_id="nobody")
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await registry_pb2_grpc.RegistryStub(channel).Drain(request, timeout=WAIT_S)
            await until(lambda: not is_logged or bool(reasons_in(lines)))
        keeping.cancel()
        return found.value.code(), why_refused(found.value, Role.REGISTRY)

    with capture_logs() as lines:
        code, why = run_async(scenario(lines))
    return code, why, reasons_in(lines)


def untrusted(made: Certificates, folder: Path, role: Role, *, is_expired: bool) -> Peers:
    """A process whose certificate has expired, or is of another CA."""
    authority = made if is_expired else Certificates(folder / "other")
    return unchecked_peers(made, role, role, authority, ago=timedelta(days=5 if is_expired else 0))


def test_role_of_the_table_is_served(made: Certificates) -> None:
    code, _, logged = ask(peers_of(made, Role.REGISTRY), peers_of(made, Role.OPERATOR))

    assert (code, logged) == (grpc.StatusCode.NOT_FOUND, [])


@pytest.mark.parametrize("role", [Role.WORKER, Role.FRONTEND, Role.REGISTRY])
def test_other_role_is_refused_on_both_sides(made: Certificates, role: Role) -> None:
    code, why, logged = ask(peers_of(made, Role.REGISTRY), peers_of(made, role), is_logged=True)

    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert why == f"the peer is spiffe://plane.test/{role}, and unbroken.v1.Registry/Drain is for the role operator"
    assert logged == [why]


def test_server_of_another_role_is_refused(made: Certificates) -> None:
    impostor = unchecked_peers(made, Role.REGISTRY, Role.WORKER)

    code, why, _ = ask(impostor, peers_of(made, Role.OPERATOR))

    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("the process at this address does not have the role registry (")


@pytest.mark.parametrize("is_expired", [True, False])
def test_server_that_is_not_trusted_is_refused_on_both_sides(
    made: Certificates, tmp_path: Path, is_expired: bool
) -> None:
    server = untrusted(made, tmp_path, Role.REGISTRY, is_expired=is_expired)

    code, why, logged = ask(server, peers_of(made, Role.OPERATOR), is_logged=True)

    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("the certificate of the registry is not accepted: it has expired, or is of another CA (")
    assert logged[0] == "it hung up during the handshake: it may not accept this process's certificate"


@pytest.mark.parametrize("is_expired", [True, False])
def test_client_that_is_not_trusted_is_refused_on_both_sides(
    made: Certificates, tmp_path: Path, is_expired: bool
) -> None:
    client = untrusted(made, tmp_path, Role.OPERATOR, is_expired=is_expired)

    code, why, logged = ask(peers_of(made, Role.REGISTRY), client, is_logged=True)

    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith(
        "the registry does not accept the certificate of this process: it has expired, or is of another"
    )
    ours = "it has expired: have a new one made" if is_expired else "it is not from the CA that this process trusts"
    assert logged[0] == f"the peer's certificate is not accepted: {ours}"


def test_client_without_tls_is_refused_on_both_sides(made: Certificates) -> None:
    code, why, logged = ask(peers_of(made, Role.REGISTRY), None, is_logged=True)

    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("the registry speaks TLS: give this process a certificate (--peer-cert) (")
    assert logged[0] == "the peer does not speak TLS"


def test_server_without_tls_is_refused(made: Certificates) -> None:
    code, why, _ = ask(None, peers_of(made, Role.OPERATOR))

    assert code is grpc.StatusCode.UNAVAILABLE
    assert why.startswith("the registry does not speak TLS: give it a certificate as well (")
