"""Settings of the HTTP server and its applications."""

import re
from dataclasses import dataclass, field
from typing import Literal

from services.core.flow.client_flow import ClientBounds
from services.core.generation.wish import KeepConfig

UnknownFields = Literal["refuse", "refuse-misspelt", "ignore"]

PROBE_PATHS = ("/live", "/health")
"""Health checks. They are accepted and started before all other requests, so that no load delays them."""
PROBE_RPC = "/grpc.health.v1.Health/Check"
"""The same over gRPC. It cannot be told before its connection is set up: clients wait for the server's settings."""
STRANGER_BODY_BYTES_MAX = 4 * 1024
"""The largest body of a request without a key, where clients need keys. Those that need none have little to send."""
GRPC = re.compile(r"application/grpc(?=[+;]|$)")
"""The Content-Type of gRPC, which has suffixes. That of gRPC-Web begins alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Settings that all connections of a server share.

    `body_bytes_max`: the largest request body, after decompression. `client`: how slowly a client may read.
    `request_timeout_s`: the deadline of requests that bring none; None: no deadline. `overload_status`: the status of
    refusals for lack of capacity. `cors_origins`: whose pages may read answers; "*": all. `unknown_fields`: what
    happens to requests with fields that no API has; by default those are refused that resemble a field.
    `sse_keepalive_s`: how long a stream is silent before a comment is sent; None: no comments are sent.

    `body_read_s_max`: how long a request may take to arrive. `lingering_s_max`: how long the rest of a refused request
    is read and discarded, so that the client sees the response, and how long a client over HTTP/2 may take to close a
    connection whose last answer is sent. `keepalive_s`: how long an idle connection stays open. `shutdown_s_max`: how
    long running answers may continue when the server closes. `backlog`: how many connections may wait in the kernel to
    be accepted. `takes_reserve`: connections may take the last file descriptors, because they are calls of this
    program's own processes.
    """

    body_bytes_max: int = 64 * 1024 * 1024
    client: ClientBounds = field(default_factory=ClientBounds)
    request_timeout_s: float | None = None
    overload_status: int = 503
    cors_origins: tuple[str, ...] = ()
    unknown_fields: UnknownFields = "refuse-misspelt"
    sse_keepalive_s: float | None = None
    keep: KeepConfig = field(default_factory=KeepConfig)
    body_read_s_max: float = 60.0
    lingering_s_max: float = 10.0
    keepalive_s: float = 75.0
    shutdown_s_max: float = 1.0
    backlog: int = 4096
    takes_reserve: bool = False
