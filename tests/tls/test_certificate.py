"""A certificate that cannot be used is refused with a sentence that says why, and that holds no part of a key."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from services.tls import certificate as module
from services.tls.certificate import CertificateError, PairFiles, certificate_of, server_context
from tests.tls.support import Certificates


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def loaded(files: PairFiles) -> module.Certificate:
    return certificate_of(server_context(files), files)


def test_certificate_tells_its_end_and_its_uris(made: Certificates) -> None:
    files = made.pair(days=30, uris=["spiffe://example.org/worker"])

    certificate = loaded(files)

    assert certificate.uris == ("spiffe://example.org/worker",)
    assert abs(certificate.expires - datetime.now(UTC) - timedelta(days=30)) < timedelta(minutes=1)


def test_expired_certificate_is_refused(made: Certificates) -> None:
    files = made.pair(days=1, ago=timedelta(days=2))

    with pytest.raises(CertificateError, match=r"edge\.pem cannot be used: it has expired: have a new one made"):
        loaded(files)


def test_certificate_of_the_future_is_refused(made: Certificates) -> None:
    files = made.pair(ago=timedelta(days=-1))

    with pytest.raises(CertificateError, match="not valid yet: look at the clocks"):
        loaded(files)


def test_key_of_another_certificate_is_refused(made: Certificates) -> None:
    one, other = made.pair("one"), made.pair("other")

    with pytest.raises(CertificateError, match=r"other\.key is not that of the certificate .*one\.pem"):
        server_context(PairFiles(one.cert, other.key))


def test_encrypted_key_is_refused_and_nobody_is_asked(made: Certificates) -> None:
    files = made.pair()
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(b"secret")
    files.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))

    with pytest.raises(CertificateError, match=r"edge\.key is encrypted: give one without a passphrase"):
        server_context(files)


@pytest.mark.parametrize("name", ["cert", "key"])
def test_missing_file_is_named(made: Certificates, name: str) -> None:
    files = made.pair()
    getattr(files, name).unlink()

    with pytest.raises(CertificateError, match=f"{getattr(files, name)} cannot be read: No such file"):
        server_context(files)


@pytest.mark.parametrize("name", ["cert", "key"])
def test_file_that_is_no_pem_is_refused(made: Certificates, name: str) -> None:
    files = made.pair()
    getattr(files, name).write_text("nothing of the kind")

    with pytest.raises(CertificateError, match="both must be PEM"):
        server_context(files)


def test_file_is_bounded(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    files = made.pair()
    monkeypatch.setattr(module, "PEM_BYTES_MAX", 100)

    with pytest.raises(CertificateError, match="is larger than 100 bytes"):
        server_context(files)


def test_no_message_has_a_part_of_the_key(made: Certificates) -> None:
    one, other = made.pair("one"), made.pair("other")
    body = other.key.read_text().splitlines()[1]

    with pytest.raises(CertificateError) as found:
        server_context(PairFiles(one.cert, other.key))

    assert not any(body[start : start + 8] in str(found.value) for start in range(len(body) - 8))


@pytest.mark.parametrize("curve", [ec.SECP256K1, ec.BrainpoolP256R1])
def test_key_of_a_kind_that_clients_do_not_use_is_refused(
    made: Certificates, curve: type[ec.EllipticCurve], monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL loads it, but no handshake succeeds."""
    monkeypatch.setattr(ec, "SECP256R1", curve)
    files = made.pair()

    with pytest.raises(CertificateError, match=r"edge\.pem cannot be used: clients do not use keys of its kind"):
        loaded(files)


@pytest.mark.parametrize("label", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_certificate_with_another_label_is_refused(made: Certificates, label: str) -> None:
    files = made.pair()
    files.cert.write_text(files.cert.read_text().replace("CERTIFICATE", label))

    with pytest.raises(CertificateError, match=r"edge\.pem has no `BEGIN CERTIFICATE`: convert it"):
        loaded(files)


def test_file_that_is_replaced_while_it_is_read_is_refused(made: Certificates) -> None:
    files = made.pair()
    context = server_context(files)
    made.pair()

    with pytest.raises(CertificateError, match=r"edge\.pem cannot be used"):
        certificate_of(context, files)


def test_chain_that_clients_refuse_for_its_length_is_refused(made: Certificates) -> None:
    files = made.pair()
    one = files.cert.read_bytes()
    files.cert.write_bytes(one * (200_000 // len(one)))

    with pytest.raises(CertificateError, match="its chain is too long for clients"):
        loaded(files)


def test_text_within_a_certificate_is_refused(made: Certificates) -> None:
    files = made.pair()
    files.cert.write_text(files.cert.read_text().replace("CERTIFICATE-----\n", "CERTIFICATE-----\nü\n", 1))

    with pytest.raises(CertificateError, match="it is not understood"):
        loaded(files)


def test_server_speaks_no_old_version(made: Certificates) -> None:
    context = server_context(made.pair())
    client = made.client_context()
    client.check_hostname = False
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.maximum_version = ssl.TLSVersion.TLSv1_1

    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        module.peer_of(client, context)
