"""The roles of processes, by the SPIFFE ids in their certificates: `spiffe://DOMAIN/ROLE`."""

from collections.abc import Mapping, Sequence
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


EVERY_ROLE = frozenset(Role)
SESSIONS = frozenset({Role.FRONTEND})
"""The roles that may open a session with a worker."""
MAY_CALL: Mapping[str, frozenset[Role]] = {
    "unbroken.v1.Registry/Register": frozenset({Role.WORKER}),
    "unbroken.v1.Registry/Watch": frozenset({Role.FRONTEND}),
    "unbroken.v1.Registry/List": frozenset({Role.FRONTEND, Role.OPERATOR}),
    "unbroken.v1.Registry/Drain": frozenset({Role.OPERATOR}),
    "unbroken.v1.Worker/FetchTokenizer": frozenset({Role.FRONTEND}),
    "unbroken.v1.Inference/Generate": frozenset({Role.OPERATOR}),
    "unbroken.v1.Inference/Resume": frozenset({Role.OPERATOR}),
    "unbroken.v1.Inference/Cancel": frozenset({Role.OPERATOR}),
    "grpc.health.v1.Health/Check": EVERY_ROLE,
    "grpc.health.v1.Health/List": EVERY_ROLE,
    "grpc.health.v1.Health/Watch": EVERY_ROLE,
    "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": frozenset({Role.OPERATOR}),
    "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({Role.OPERATOR}),
}
"""Which roles may call which rpcs of workers and registries. What is not listed, nobody may call."""


def callers_of(path: str) -> frozenset[Role]:
    """The roles that may call the rpc with this path, such as `/unbroken.v1.Registry/Watch`."""
    return MAY_CALL.get(path.removeprefix("/"), frozenset())
