"""gRPC for processes that serve nothing else to their clients, such as workers."""

from contextlib import AbstractAsyncContextManager

from services.http.app import HttpApp
from services.http.grpc.routes import GrpcRoutes
from services.http.server.config import HttpConfig
from services.http.server.listener import HttpServer, Listen, http_server
from services.http.server.secure import Tls

CLOSE_GRACE_S = 0.5
"""How long rpcs may continue when the server closes. Those that watch something never end by themselves."""


def rpc_server(rpcs: GrpcRoutes, listen: str, tls: Tls | None = None) -> AbstractAsyncContextManager[HttpServer]:
    """Serve `rpcs` on `host:port`; port 0 takes any free port. Raises StartupError as `http_server` does.

    `tls`: how callers are served over TLS; None: they are not.
    """
    config = HttpConfig(client=rpcs.bounds, shutdown_s_max=CLOSE_GRACE_S)
    app = HttpApp(config, config.body_bytes_max, is_draining=lambda: False)
    app.routes.note(f"This address serves gRPC, and nothing over HTTP. {rpcs.listed()}")
    return http_server(app, config, Listen(listen, "gRPC", "--listen"), rpcs=rpcs, tls=tls)
