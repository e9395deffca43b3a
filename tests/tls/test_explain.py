"""Why a handshake failed is a sentence that a person can act on."""

import ssl

import pytest

from services.tls.certificate import peer_of, server_context
from services.tls.connection import PlainPeer, Refused
from services.tls.explain import is_departure, why_failed
from tests.tls.support import shared_certificates


def failure(client: ssl.SSLContext, server: ssl.SSLContext) -> Exception:
    with pytest.raises(ssl.SSLError) as found:
        peer_of(client, server)
    return found.value


def test_certificate_of_another_ca() -> None:
    client = ssl.create_default_context()
    client.check_hostname = False

    why = why_failed(failure(client, server_context(shared_certificates().pair())))

    assert why == "the peer's certificate is not accepted: it is not from the CA that this process trusts"


def test_no_common_version() -> None:
    server = server_context(shared_certificates().pair())
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    client = shared_certificates().client_context()
    client.check_hostname = False
    client.maximum_version = ssl.TLSVersion.TLSv1_2

    assert "versions of TLS" in why_failed(failure(client, server))


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (
            "TLSV1_ALERT_UNKNOWN_CA",
            "the peer does not accept the certificate of this process: it is not from the peer's CA",
        ),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "the peer does not accept the certificate of this process: it has expired"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "the peer asks for a certificate, and this process has none"),
        ("SOMETHING_NEW", "something new"),
    ],
)
def test_alert_of_the_peer(reason: str, why: str) -> None:
    error = ssl.SSLError(1, "[SSL] what OpenSSL says")
    error.reason = reason

    assert why_failed(error) == why


@pytest.mark.parametrize(
    ("error", "why", "is_quiet"),
    [
        (PlainPeer("…"), "the peer does not speak TLS", False),
        (Refused("not you"), "not you", False),
        (TimeoutError("too long"), "too long", False),
        (ssl.SSLError(ssl.SSL_ERROR_SSL, "it hung up"), "it hung up", False),
        (ConnectionResetError("gone"), "gone", True),
    ],
)
def test_other_failures(error: Exception, why: str, is_quiet: bool) -> None:
    assert why_failed(error) == why
    assert is_departure(error) == is_quiet
