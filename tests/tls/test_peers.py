"""A process of the plane shows a certificate of its own role, which both ends of every connection would accept."""

import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from services.tls import peers as module
from services.tls.certificate import CertificateError, peer_of
from services.tls.peers import Identity, PeerFiles, load_peer
from services.tls.roles import Role
from tests.tls.support import Certificates, peer_files

ID = "spiffe://plane.test/worker"


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "ours")


def test_process_knows_its_identity_and_shows_no_key(made: Certificates) -> None:
    files = peer_files(made, Role.WORKER)

    pair = load_peer(files, Role.WORKER)

    assert pair.identity == Identity("plane.test", "worker")
    assert str(pair.identity) == ID
    assert files.key.read_text().splitlines()[1] not in repr(pair)


def test_certificate_of_another_role_is_refused(made: Certificates) -> None:
    files = peer_files(made, Role.FRONTEND)

    with pytest.raises(
        CertificateError, match=r"is spiffe://plane\.test/frontend, and this process is of the role worker"
    ):
        load_peer(files, Role.WORKER)


@pytest.mark.parametrize(
    "uris", [[], ["https://plane.test/worker"], [ID, "spiffe://plane.test/registry"], ["spiffe://x"]]
)
def test_certificate_without_one_id_is_refused(made: Certificates, uris: list[str]) -> None:
    pair = made.pair("odd", uris=uris, is_client=True)

    with pytest.raises(CertificateError, match="has not one SPIFFE id such as spiffe://DOMAIN/worker"):
        load_peer(PeerFiles(pair.cert, pair.key, made.ca), Role.WORKER)


def test_certificate_of_another_ca_is_refused(made: Certificates, tmp_path: Path) -> None:
    files, other = peer_files(made, Role.WORKER), Certificates(tmp_path / "other")

    with pytest.raises(CertificateError, match=r"worker\.pem is not accepted with the CA .*other/ca\.pem"):
        load_peer(PeerFiles(files.cert, files.key, other.ca), Role.WORKER)


def test_ca_that_vanishes_while_it_is_read_is_refused(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    files = peer_files(made, Role.WORKER)

    def read(file: Path) -> bytes:
        content = file.read_bytes()
        if file == files.ca:
            file.unlink()
        return content

    monkeypatch.setattr(module, "read_pem", read)

    with pytest.raises(CertificateError, match=r"ca\.pem cannot be read: No such file"):
        load_peer(files, Role.WORKER)


def test_certificate_with_which_no_handshake_succeeds_is_refused(
    made: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is if the configuration of the library forbids TLS 1.3."""

    def peer_of_older(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
        server.maximum_version = ssl.TLSVersion.TLSv1_2
        return peer_of(client, server)

    monkeypatch.setattr(module, "peer_of", peer_of_older)

    with pytest.raises(CertificateError, match=r"no handshake succeeds with the certificate .*worker\.pem"):
        load_peer(peer_files(made, Role.WORKER), Role.WORKER)


def test_expired_certificate_is_refused(made: Certificates) -> None:
    files = peer_files(made, Role.WORKER, ago=timedelta(days=5))

    with pytest.raises(CertificateError, match="it has expired: have a new one made"):
        load_peer(files, Role.WORKER)


def test_certificate_that_is_not_for_clients_is_refused(made: Certificates) -> None:
    pair = made.pair("worker", uris=[ID], is_client=False)

    with pytest.raises(CertificateError, match="is not accepted with the CA"):
        load_peer(PeerFiles(pair.cert, pair.key, made.ca), Role.WORKER)


def test_ca_that_is_no_pem_is_refused(made: Certificates) -> None:
    files = peer_files(made, Role.WORKER)
    files.ca.write_text("nothing")

    with pytest.raises(CertificateError, match=r"the CA .*ca\.pem cannot be used: it must be PEM"):
        load_peer(files, Role.WORKER)
