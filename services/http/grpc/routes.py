"""The rpcs of a server. Generated code registers its services here as it does with grpc.aio's server."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc
import structlog

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure
from services.core.flow.client_flow import ClientBounds
from services.core.tenant import EVERYBODY, Tenant
from services.http.errors import no_room
from services.http.grpc.messages import Compression
from services.http.grpc.metadata import RpcError, failed, head_block, misused, trailers_block
from services.http.grpc.rpc import Method
from services.http.grpc.stream_rpc import RejectedRpc, StreamRpc
from services.http.h2.request import Host
from services.http.h2.stream import Receiver, Stream
from services.http.h2.wire.fields import RequestHead
from services.runtime.log_throttle import LogThrottle
from services.tls.connection import Refused
from services.tls.peers import Peers
from services.tls.roles import callers_of

log = structlog.get_logger()

_ROLE_HINT = "Give the caller a certificate of that role."

Guard = Callable[[Mapping[str, str]], Tenant]
"""Called with the header fields of each rpc of a service before its request is read, and before its metadata is
decoded. Returns the caller's tenant. Raises Failure."""
DEFAULT_BOUNDS = ClientBounds()
Servicer = TypeVar("Servicer")


class GrpcRoutes:
    """The rpcs of a server. `methods`: by path."""

    def __init__(
        self,
        bounds: ClientBounds = DEFAULT_BOUNDS,
        on_refused: Callable[[str, Failure], None] = lambda *_: None,
        peers: Peers | None = None,
    ) -> None:
        """`bounds`: how slowly a client may read the end of an answer. `peers`: callers are processes of the plane, and
        their roles say what they may call (see roles.py).

        `on_refused`: called with the path and the failure of an rpc that fails before its handler is called.
        """
        self.bounds = bounds
        self.on_refused = on_refused
        self.compression = Compression()
        self.methods: dict[str, Method] = {}
        self._services: set[str] = set()
        self._guards: dict[str, Guard] = {}
        self._rng = random.Random()
        self._private: set[str] = set()
        self._peers = peers
        self._throttle = LogThrottle()
        self._open: set[str] = set()

    def add(self, add_to_server: Callable[[Servicer, Any], None], servicer: Servicer) -> None:
        """Serve a service. `add_to_server`: the generated function that registers it."""
        add_to_server(servicer, self)

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, "grpc.RpcMethodHandler[Any, Any]"]
    ) -> None:
        """Called by generated code."""
        self._services.add(service)
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = Method(handler)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Called by generated code, for the methods that it has registered before."""

    def guard(self, service: str, guard: Guard, *, takes_pages: bool = False) -> None:
        """Call `guard` first for every rpc of a service, also if there is no such method.

        `takes_pages`: whether pages of other origins may read the answers, if they are allowed to at all.
        """
        self._guards[service] = guard
        if not takes_pages:
            self._private.add(service)

    def open_to_strangers(self, service: str) -> None:
        """Let clients without a key call a service, where clients need keys. Its requests must be small."""
        self._open.add(service)

    def is_open(self, path: str) -> bool:
        """Whether clients without a key may call the service of `path`, where clients need keys."""
        return _service_of(path) in self._open

    def is_private(self, path: str) -> bool:
        """Whether no page of another origin may read what the service of `path` answers."""
        return _service_of(path) in self._private

    def check(self, path: str, headers: Mapping[str, str]) -> Tenant:
        """Returns the caller's tenant. Raises Failure if the client may not call the method."""
        if not self._guards or (guard := self._guards.get(_service_of(path))) is None:
            return EVERYBODY
        return guard(headers)

    def no_room(self) -> bytes:
        """The block of header fields that answers an rpc for whose connection there is no room."""
        error = failed(no_room(self._rng), code=grpc.StatusCode.UNAVAILABLE)
        return head_block(()) + trailers_block(error.code, error.message, error.trailing)

    def open(self, host: Host, stream: Stream, head: RequestHead) -> Receiver:
        """An rpc has begun to arrive. Returns what takes its content."""
        method = self.methods.get(head.path)
        if (error := self._refused_peer(host, head.path)) is not None:
            return RejectedRpc(host, stream, error)
        if head.broken is not None:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED if head.broken.status == 431 else grpc.StatusCode.INTERNAL
            return RejectedRpc(host, stream, misused(code, str(head.broken)))
        if method is not None and head.method == "POST":
            return StreamRpc(host, stream, head, method, self)
        return RejectedRpc(host, stream, self._rejection(head))

    def _refused_peer(self, host: Host, path: str) -> RpcError | None:
        """Why the peer may not call this, by the role in its certificate; None if it may, or if there is no TLS."""
        if self._peers is None:
            return None
        try:
            tls = host.transport.get_extra_info("ssl_object")
            self._peers.check_client(tls, callers_of(path), f"{path[1:QUOTED_CHARACTERS_MAX]} is for the role")
        except Refused as refused:
            if self._throttle.should_log():
                log.warning("an rpc was refused", why=str(refused))
            return misused(grpc.StatusCode.PERMISSION_DENIED, str(refused), _ROLE_HINT)
        return None

    def _rejection(self, head: RequestHead) -> RpcError:
        """Why there is no such method."""
        try:
            self.check(head.path, head.headers)
        except Failure as failure:
            return failed(failure)
        if head.path in self.methods:
            return misused(grpc.StatusCode.UNIMPLEMENTED, f"an rpc is sent with POST, not {head.method[:20]}")
        service = _service_of(head.path)
        what, hint = ("method", self._methods_of(service)) if service in self._services else ("service", self.listed())
        detail = f"this server has no {what} {head.path[:QUOTED_CHARACTERS_MAX]}"
        return misused(grpc.StatusCode.UNIMPLEMENTED, detail, hint)

    def listed(self) -> str:
        """Names the services, for people."""
        return f"The gRPC services are {', '.join(sorted(self._services))}."

    def _methods_of(self, service: str) -> str:
        names = [path.rpartition("/")[2] for path in self.methods if _service_of(path) == service]
        return f"{service} has {', '.join(sorted(names))}."


def _service_of(path: str) -> str:
    return path[1:].partition("/")[0]
