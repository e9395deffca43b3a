"""Opens gRPC channels to the other processes of the plane."""

import grpc

from services.rpc.status import CHANNEL_OPTIONS
from services.tls.peers import Peers
from services.tls.roles import Role, dns_name

DETAIL_CHARACTERS_MAX = 300
"""How much is shown of what gRPC's library says."""


def open_channel(address: str, peers: Peers | None, role: Role) -> grpc.aio.Channel:
    """A channel to the process at `host:port`, which has this role. `peers`: None: without TLS.

    gRPC's library in Python looks only for the name of a host in a server's certificate, so a role has one. A channel
    keeps the certificate with which it began.
    """
    if peers is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    ca, key, cert = peers.loaded.pem
    name = ("grpc.ssl_target_name_override", dns_name(peers.loaded.identity.domain, role))
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    return grpc.aio.secure_channel(address, credentials, options=[*CHANNEL_OPTIONS, name])


def why_refused(error: grpc.aio.AioRpcError, role: Role) -> str:
    """Why an rpc failed, and what to do if it was for TLS. `role`: that of the server."""
    details = error.details() or ""
    for sign, meaning in _MEANINGS.items():
        if sign in details:
            return f"{meaning.format(role=role)} ({details[:DETAIL_CHARACTERS_MAX]})"
    return details


_MEANINGS = {
    "Hostname Verification Check failed": "the process at this address does not have the role {role}",
    "CERTIFICATE_VERIFY_FAILED": "the certificate of the {role} is not accepted: it has expired, or is of another CA",
    "WRONG_VERSION_NUMBER": "the {role} does not speak TLS: give it a certificate as well",
    "Trying to connect an http1.x server": "the {role} speaks TLS: give this process a certificate (--peer-cert)",
    "CERTIFICATE_REQUIRED": "the {role} asks for a certificate: give this process one (--peer-cert)",
    "TSI_DATA_CORRUPTED": "the {role} does not accept the certificate of this process: it has expired, or is of another"
    " CA; the log there says which",
}
"""What gRPC's library says of TLS, and what it means."""
