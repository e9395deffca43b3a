"""Registers the rpcs of a server as routes of an HTTP application, where gRPC-Web finds them."""

from functools import partial

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, quoted
from services.http.errors import error_response
from services.http.grpc.routes import GrpcRoutes
from services.http.grpc.rpc import Method
from services.http.grpc.web.forms import forms_of
from services.http.grpc.web.rpc import WebRpc
from services.http.router import Router
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response

UNSUPPORTED_MEDIA_TYPE = 415


class WebRoutes:
    """The rpcs of `rpcs` over gRPC-Web. They share an HTTP application's CORS, request ids, drain and bounds."""

    def __init__(self, rpcs: GrpcRoutes) -> None:
        self._rpcs = rpcs
        self._executor = BoundedExecutor()

    def add_to(self, routes: Router) -> None:
        """Register all methods. Call it once all services are registered."""
        for path, method in self._rpcs.methods.items():
            routes.post(path, partial(self._serve, method), is_listed=False)
            if self._rpcs.is_open(path):
                routes.open(path)
            else:
                routes.guard(path, self._check, is_private=self._rpcs.is_private(path), reports_refusals=True)
        routes.note(self._rpcs.listed())

    async def _serve(self, method: Method, request: HttpRequest, exchange: Exchange) -> Response | None:
        if (forms := forms_of(request.headers)) is None:
            if request.refusal is not None:
                raise request.refusal
            return _unsupported(request)
        sent, wanted = forms
        rpc = WebRpc(request, exchange, method, self._rpcs, wanted)
        await rpc.answer(sent, self._executor)
        return None

    def _check(self, request: HttpRequest) -> None:
        """Raises UNAUTHENTICATED, so that no body is waited for. The rpc tells of it, and of whatever else is wrong."""
        self._rpcs.check(request.path, request.headers)


def _unsupported(request: HttpRequest) -> Response:
    given = quoted(request.headers.get("content-type", "none"))
    detail = f"an rpc of this Content-Type is not served here: {given}: use gRPC over HTTP/2, or gRPC-Web"
    response = error_response(Failure(Reason.INVALID_ARGUMENT, detail), request.id)
    response.status = UNSUPPORTED_MEDIA_TYPE
    return response
