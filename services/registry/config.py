"""Configuration of a registry process."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.tls.peers import PeerFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """How to connect to etcd. The password and the keys are never logged.

    endpoints: host:port of members of one cluster. One is used at a time; the next one when it fails.
    is_tls: without `ca` the system's root certificates are trusted.
    ca, client_cert, client_key: PEM.
    call_timeout_s: for each try of each call.
    """

    endpoints: Sequence[str]
    username: str = ""
    password: str = field(default="", repr=False)
    is_tls: bool = False
    ca: bytes | None = field(default=None, repr=False)
    client_cert: bytes | None = field(default=None, repr=False)
    client_key: bytes | None = field(default=None, repr=False)
    call_timeout_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryConfig:
    """Configuration of one registry.

    listen: host:port; port 0 takes a free port.
    etcd: None for the embedded store.
    ready_file: written with `{"address": "host:port"}` when the registry listens.
    peers: the certificate for the other processes of the plane; None: they are served without TLS.
    """

    listen: str = "127.0.0.1:50050"
    etcd: EtcdConfig | None = None
    ready_file: Path | None = None
    peers: PeerFiles | None = None
