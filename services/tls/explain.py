"""Says in a sentence why a handshake failed, and what to do about it."""

import ssl

from services.tls.certificate import invalid
from services.tls.connection import PlainPeer, Refused

_BY_REASON = {
    "ALERT_UNKNOWN_CA": "the peer does not accept the certificate of this process: it is not from the peer's CA",
    "ALERT_CERTIFICATE_EXPIRED": "the peer does not accept the certificate of this process: it has expired",
    "ALERT_BAD_CERTIFICATE": "the peer does not accept the certificate of this process",
    "ALERT_CERTIFICATE_UNKNOWN": "the peer does not accept the certificate of this process",
    "ALERT_CERTIFICATE_REQUIRED": "the peer asks for a certificate, and this process has none",
    "ALERT_DECRYPT_ERROR": "the peer cannot read the handshake",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer has no certificate: it needs one from the CA of this process",
    "NO_SHARED_CIPHER": "the peer supports no cipher of this process",
    "UNSUPPORTED_PROTOCOL": "the peer supports only versions of TLS that are too old",
    "ALERT_PROTOCOL_VERSION": "the peer does not support the versions of TLS of this process",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
}
"""What OpenSSL calls the reason, without the version in front of alerts."""
_VERSIONS = ("SSLV3_", "TLSV1_", "TLSV13_")


def why_failed(error: Exception) -> str:
    """Why a handshake failed."""
    match error:
        case ssl.SSLCertVerificationError():
            return f"the peer's certificate is not accepted: {_unverified(error)}"
        case ssl.SSLError():
            return _BY_REASON.get(reason := _reason(error)) or reason.lower().replace("_", " ") or str(error)
        case PlainPeer():
            return "the peer does not speak TLS"
        case Refused():
            return str(error)
    return str(error) or type(error).__name__


def is_departure(error: Exception) -> bool:
    """Whether the peer just left, as port scanners and probes over TCP do."""
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError | TimeoutError)


def _reason(error: ssl.SSLError) -> str:
    reason: str = getattr(error, "reason", None) or ""  # Errors that this program makes have none.
    for version in _VERSIONS:
        reason = reason.removeprefix(version)
    return reason


_NOT_OURS = (18, 19, 20, 21)
"""X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT and others of a chain that ends elsewhere. Source: openssl verify(1)."""


def _unverified(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code in _NOT_OURS:
        return "it is not from the CA that this process trusts"
    return invalid(error)
