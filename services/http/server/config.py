"""What can be set about the HTTP side."""

from dataclasses import dataclass, field

from services.core.client_flow import ClientBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Bounds of the HTTP side.

    body_bytes_max: the largest request body, after decompression. client: how slowly one may read. request_timeout_s:
    the deadline of requests that bring none; None: no deadline. overload_status: of refusals for want of capacity.
    cors_origins: whose pages may read answers; "*": all.
    body_read_s_max: how long a request may take to arrive. lingering_s_max: how long the rest of a refused one is read
    and thrown away, so that the client sees its answer. keepalive_s: how long an idle connection stays open.
    shutdown_s_max: how long answers that still run when the server closes may go on. backlog: connections that may wait
    to be accepted.
    """

    body_bytes_max: int = 64 * 1024 * 1024
    client: ClientBounds = field(default_factory=ClientBounds)
    request_timeout_s: float | None = None
    overload_status: int = 503
    cors_origins: tuple[str, ...] = ()
    body_read_s_max: float = 60.0
    lingering_s_max: float = 10.0
    keepalive_s: float = 75.0
    shutdown_s_max: float = 1.0
    backlog: int = 4096
