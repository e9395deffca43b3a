"""What a registry is told when it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdConfig:
    """How to reach etcd. ca, client_cert and client_key are PEM; the password never shows in a log.

    endpoints: host:port each, members of one cluster; one at a time is used, the next when it fails. With is_tls and no
    ca the system's roots are trusted. call_timeout_s: for each try of each call.
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
    """listen: host:port, where port 0 takes a free one. etcd: None for the embedded store.

    ready_file: where to write `{"address": "host:port"}` once it listens, for whoever started this process.
    """

    listen: str = "127.0.0.1:50050"
    etcd: EtcdConfig | None = None
    ready_file: Path | None = None
