"""Reads a certificate and its private key, and says in a sentence why they cannot be used.

A pair is tried in a handshake with itself, in memory: so it is known to fit, to be valid today, and to be understood by
the very library that will use it. Nothing here ever shows a part of a key.
"""

import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from services.runtime.process import StartupError

PEM_BYTES_MAX = 1024 * 1024
"""The size of one file: a certificate, its issuers, or a key."""
ALPN = ("h2", "http/1.1")
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)
_STEPS_MAX = 10
"""Flights of a handshake in memory: TLS 1.3 needs three."""
_UNUSABLE = {
    "NO_SHARED_CIPHER": "clients do not use keys of its kind: have one made with a key of ECDSA P-256, or of RSA",
    "EXCESSIVE_MESSAGE_SIZE": "its chain is too long for clients: leave out what is not its issuer",
}
"""What OpenSSL calls the reason why a certificate that can be loaded cannot be served."""
_EXPIRED, _NOT_YET = 10, 9  # X509_V_ERR_CERT_HAS_EXPIRED, X509_V_ERR_CERT_NOT_YET_VALID: openssl verify(1).


class CertificateError(StartupError):
    """The files cannot be used. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PairFiles:
    """Where a certificate with its issuers is, and its private key, both as PEM."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a certificate says. `uris`: of its subject's alternative names. `expires`: in UTC."""

    expires: datetime
    uris: tuple[str, ...]

    @property
    def expires_at(self) -> float:
        """In seconds since the epoch."""
        return self.expires.timestamp()


def server_context(files: PairFiles) -> ssl.SSLContext:
    """A context for servers with this pair, for clients without certificates. Raises CertificateError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(list(ALPN))
    load_pair(context, files)
    return context


def load_pair(context: ssl.SSLContext, files: PairFiles) -> None:
    """Load the pair into the context. Raises CertificateError."""
    for file in (files.cert, files.key):
        read_pem(file)
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except _EncryptedError:
        raise CertificateError(f"the key {files.key} is encrypted: give one without a passphrase") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            why = f"the key {files.key} is not that of the certificate {files.cert}: give those that were made together"
            raise CertificateError(why) from None
        why = (
            f"the certificate {files.cert} and the key {files.key} cannot be used ({_reason(error)}): both must be PEM"
        )
        raise CertificateError(why) from None
    except OSError as error:
        raise CertificateError(f"{files.cert} or {files.key} cannot be read: {error.strerror}") from None


def read_pem(file: Path) -> bytes:
    """The content of a file. Raises CertificateError."""
    try:
        with file.open("rb") as opened:
            content = opened.read(PEM_BYTES_MAX + 1)
    except OSError as error:
        raise CertificateError(f"{file} cannot be read: {error.strerror}") from None
    if len(content) > PEM_BYTES_MAX:
        raise CertificateError(f"{file} is larger than {PEM_BYTES_MAX} bytes")
    return content


def certificate_of(context: ssl.SSLContext, files: PairFiles) -> Certificate:
    """What the certificate of a server's context says. `files`: those that are loaded in it.

    Raises CertificateError if it is not valid at present, or no client could use it.
    """
    found = _CERTIFICATE.search(read_pem(files.cert))
    if found is None:  # OpenSSL loads certificates with other labels, too.
        raise CertificateError(f"{files.cert} has no `BEGIN CERTIFICATE`: convert it with `openssl x509`")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # It need not be a CA.
    try:
        client.load_verify_locations(cadata=found[0].decode("ascii"))
        return decoded(peer_of(client, context))
    except ssl.SSLCertVerificationError as error:
        why = invalid(error)
    except ssl.SSLError as error:
        why = _UNUSABLE.get(error.reason) or f"clients cannot read it ({_reason(error)})"
    except ValueError:  # The file is not ASCII, or a date in it is out of range.
        why = "it is not understood"
    raise CertificateError(f"the certificate {files.cert} cannot be used: {why}")


def peer_of(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    """The server's certificate as a client gets it, in memory. Raises SSLError if the handshake fails."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True))
    is_done = [False, False]
    for _ in range(_STEPS_MAX):
        for index, end in enumerate(ends):
            try:
                end.do_handshake()
                is_done[index] = True
            except ssl.SSLWantReadError:
                pass
        if all(is_done):
            return ends[0].getpeercert() or {}
    raise ssl.SSLError(ssl.SSL_ERROR_SSL, "the handshake does not end")


def decoded(peer: dict[str, Any]) -> Certificate:
    """A certificate as `getpeercert` returns it."""
    expires = datetime.fromtimestamp(ssl.cert_time_to_seconds(peer["notAfter"]), UTC)
    return Certificate(expires, tuple(value for kind, value in peer.get("subjectAltName", ()) if kind == "URI"))


def invalid(error: ssl.SSLCertVerificationError) -> str:
    """Why a certificate is not accepted, and what to do."""
    if error.verify_code == _EXPIRED:
        return "it has expired: have a new one made"
    if error.verify_code == _NOT_YET:
        return "it is not valid yet: look at the clocks"
    return error.verify_message


class _EncryptedError(Exception):
    pass


def _no_password() -> str:
    """Called for an encrypted key. Without it, OpenSSL would ask at the terminal."""
    raise _EncryptedError


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "not understood").lower().replace("_", " ")
