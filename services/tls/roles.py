"""The roles of processes, by the SPIFFE ids in their certificates: `spiffe://DOMAIN/ROLE`."""

from collections.abc import Sequence
from enum import StrEnum

SCHEME = "spiffe://"


class Role(StrEnum):
    """What a process is to the others."""

    FRONTEND = "frontend"
    WORKER = "worker"
    REGISTRY = "registry"
    OPERATOR = "operator"
    """A person, or a program, that operates the plane: `unbroken drain`, health checks."""


def spiffe_id(domain: str, role: Role) -> str:
    """The id of a role."""
    return f"{SCHEME}{domain}/{role}"


def dns_name(domain: str, role: Role) -> str:
    """The name by which gRPC clients of the plane know a server: their library cannot look for SPIFFE ids."""
    return f"{role}.{domain}"


def ids_in(uris: Sequence[str]) -> list[str]:
    """The SPIFFE ids among the URIs of a certificate."""
    return [uri for uri in uris if uri.startswith(SCHEME)]
