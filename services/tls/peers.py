"""TLS between the processes of a plane: each shows a certificate, and the role in it says what the process may do.

Both ends verify. A server knows a client's role by the SPIFFE id in its certificate; a client looks for the role of the
server that it means, so that no worker can pose as the registry.
"""

import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from services.tls.certificate import (
    ALPN,
    Certificate,
    CertificateError,
    PairFiles,
    certificate_of,
    decoded,
    invalid,
    load_pair,
    peer_of,
    read_pem,
)
from services.tls.connection import Refused
from services.tls.roles import SCHEME, Role, ids_in
from services.tls.watch import ServerPair, WatchedCertificate


@dataclass(frozen=True, slots=True)
class PeerFiles:
    """Where a process's certificate, its key, and the CA of all certificates of the plane are, as PEM."""

    cert: Path
    key: Path
    ca: Path

    @property
    def pair(self) -> PairFiles:
        return PairFiles(self.cert, self.key)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a process: `spiffe://DOMAIN/ROLE`."""

    domain: str
    role: str

    def __str__(self) -> str:
        return f"{SCHEME}{self.domain}/{self.role}"


@dataclass(frozen=True, slots=True)
class PeerPair(ServerPair):
    """What this process shows to others, as a server (`context`) and as a client.

    `pem`: the CA, the key and the certificate, for gRPC's library.
    """

    client: ssl.SSLContext
    identity: Identity
    pem: tuple[bytes, bytes, bytes] = field(repr=False)


class Peers:
    """How one process speaks with the others. Its files may change at any time."""

    def __init__(self, files: PeerFiles, role: Role, now: Callable[[], float]) -> None:
        """`role`: of this process. `now`: the time since the epoch. Raises CertificateError."""
        self.role = role
        self.files: WatchedCertificate[PeerPair] = WatchedCertificate(
            (files.cert, files.key, files.ca), lambda: load_peer(files, role), now
        )

    @property
    def loaded(self) -> PeerPair:
        return self.files.loaded

    def door(self, roles: Collection[Role]) -> "Door":
        """For a server that only these roles may enter."""
        return Door(self, roles)

    def check_server(self, tls: ssl.SSLObject, role: Role) -> None:
        """Raises Refused if the server at the other end has not this role."""
        self._check(tls, (role,), "this process looks for the role")

    def check_client(self, tls: ssl.SSLObject, roles: Collection[Role], what: str) -> None:
        """Raises Refused if the client at the other end has none of these roles. `what`: it wants, as a clause."""
        self._check(tls, roles, what)

    def _check(self, tls: ssl.SSLObject, roles: Collection[Role], what: str) -> None:
        identity = identity_of(tls)
        if identity is None:
            raise Refused(f"the peer's certificate has not one SPIFFE id, and {what} {_either(roles)}")
        if identity.domain != self.loaded.identity.domain:
            raise Refused(f"the peer is {identity}, of another domain than this process, {self.loaded.identity}")
        if identity.role not in roles:
            raise Refused(f"the peer is {identity}, and {what} {_either(roles)}")


class Door:
    """How a server speaks TLS to the other processes. See Tls in services/http/server/secure.py."""

    def __init__(self, peers: Peers, roles: Collection[Role]) -> None:
        self._peers = peers
        self._roles = roles

    @property
    def context(self) -> ssl.SSLContext:
        return self._peers.loaded.context

    @property
    def failures(self) -> int:
        return self._peers.files.failures

    @failures.setter
    def failures(self, count: int) -> None:
        self._peers.files.failures = count

    def admit(self, tls: ssl.SSLObject) -> None:
        """See Tls."""
        self._peers.check_client(tls, self._roles, "this port is for the role")


def peers_with(files: PeerFiles | None, role: Role) -> Peers | None:
    """How a process of this role speaks with the others; None: without TLS. Raises CertificateError."""
    return None if files is None else Peers(files, role, time.time)


def identity_of(tls: ssl.SSLObject) -> Identity | None:
    """The identity in the peer's certificate; None if it has not exactly one SPIFFE id."""
    return _identity(decoded(peer)) if (peer := tls.getpeercert()) else None


def load_peer(files: PeerFiles, role: Role) -> PeerPair:
    """Read the files. Raises CertificateError, also if the certificate is of another role or CA."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # A role is verified, not a host: addresses come from the registry.
    server.verify_mode = ssl.CERT_REQUIRED
    server.num_tickets = 0  # A session that is resumed would not be verified again.
    server.set_alpn_protocols(list(ALPN))
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        load_pair(context, files.pair)
        _load_ca(context, files.ca)
    certificate = certificate_of(_alone(files.pair), files.pair)
    identity = _identity(certificate)
    if identity is None:
        raise CertificateError(f"the certificate {files.cert} has not one SPIFFE id such as spiffe://DOMAIN/{role}")
    if identity.role != role:
        why = f"the certificate {files.cert} is {identity}, and this process is of the role {role}: give its own"
        raise CertificateError(why)
    _try(client, server, files)
    pem = (read_pem(files.ca), read_pem(files.key), read_pem(files.cert))
    return PeerPair(certificate, server, client, identity, pem)


def _alone(files: PairFiles) -> ssl.SSLContext:
    """A server's context that asks for no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_pair(context, files)
    return context


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    read_pem(ca)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise CertificateError(f"the CA {ca} cannot be used: it must be PEM") from None
    except OSError as error:
        raise CertificateError(f"{ca} cannot be read: {error.strerror}") from None


def _try(client: ssl.SSLContext, server: ssl.SSLContext, files: PeerFiles) -> None:
    """Both ends with this one certificate. Raises CertificateError if it would not be accepted."""
    try:
        peer_of(client, server)
    except ssl.SSLCertVerificationError as error:
        why = f"the certificate {files.cert} is not accepted with the CA {files.ca}: {invalid(error)}"
        raise CertificateError(why) from None
    except ssl.SSLError as error:  # Of versions, too: the library's own configuration may forbid TLS 1.3.
        raise CertificateError(f"no handshake succeeds with the certificate {files.cert}: {error}") from None


def _identity(certificate: Certificate) -> Identity | None:
    found = ids_in(certificate.uris)
    if len(found) != 1:
        return None
    domain, _, role = found[0].removeprefix(SCHEME).partition("/")
    return Identity(domain, role) if domain and role else None


def _either(roles: Collection[Role]) -> str:
    return " or ".join(sorted(roles))
