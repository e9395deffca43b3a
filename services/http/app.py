"""An HTTP application: finds the route of a request, and turns failures into responses."""

import random
from collections.abc import Callable, Mapping
from typing import Protocol

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.gate import draining
from services.core.tenant import TenantOf
from services.http.cors import ALLOW, Cors, is_preflight, preflight
from services.http.errors import error_response, no_room, no_route_response
from services.http.host_rule import HostRule
from services.http.request_id import request_id_of
from services.http.router import Handler, NoRoute, Router
from services.http.server.config import STRANGER_BODY_BYTES_MAX, HttpConfig
from services.http.server.context import BrokenHead
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response


class Shortage(Protocol):
    """Counts what cannot be accepted for want of file descriptors."""

    def count_refused(self, path: str) -> None:
        """A connection with a request for `path` was refused."""
        ...

    def count_pause(self) -> None:
        """Nothing was accepted for a while."""
        ...


class HttpApp:
    """An application of the server in `server/`. Every response has a request id; every failure has a response."""

    def __init__(
        self,
        config: HttpConfig,
        body_bytes_max: int,
        is_draining: Callable[[], bool],
        shortage: Shortage | None = None,
        tenant_of: TenantOf | None = None,
        on_unauthenticated: Callable[[HttpRequest, Failure], None] = lambda *_: None,
        host_rule: HostRule = HostRule(),  # noqa: B008
    ) -> None:
        """`body_bytes_max`: the largest request body. `is_draining`: whether connections close after their answer.

        `shortage`: counts what cannot be accepted. `tenant_of`: finds whose key a request carries; None: clients need
        no keys. `on_unauthenticated`: called with requests that are refused because they carry no valid key.
        `host_rule`: which names requests may have in `Host` and `Origin`.
        """
        self.config = config
        self.body_bytes_max = body_bytes_max
        self.routes = Router()
        self._is_draining = is_draining
        self._shortage = shortage
        self._tenant_of = tenant_of
        self._on_unauthenticated = on_unauthenticated
        self._host_rule = host_rule
        self._rng = random.Random()
        self._cors = Cors(config.cors_origins)

    def on_head(self, request: HttpRequest) -> None:
        request.id = request_id_of(request)
        request.path = self.routes.meant(request.path)
        if not self.routes.is_private(request.path):
            request.shared = self._cors.headers_of(request)
        # Browsers send it without a key. Where there is no such path, the answer would list those that there are.
        is_asked_by_page = self._is_asked_by_page(request) and bool(self.routes.methods_of(request))
        if self._tenant_of is not None and (is_asked_by_page or self.routes.is_open(request.path)):
            request.body_bytes_max = min(request.body_bytes_max, STRANGER_BODY_BYTES_MAX)
        try:
            self._host_rule.check(request, is_allowed=ALLOW in request.shared)
            if not is_asked_by_page:
                self._check(request)
        except Failure as refusal:
            refusal.clear_tracebacks()
            request.refusal = refusal

    def _check(self, request: HttpRequest) -> None:
        """Sets the request's tenant. Raises Failure if the client may not send the request."""
        self.routes.check(request)
        if self._tenant_of is not None and self.routes.needs_key(request.path):
            try:
                request.tenant = self._tenant_of(request.headers)
            except Failure as failure:
                self._on_unauthenticated(request, failure)
                raise

    async def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        if self._is_draining():
            exchange.keeps_alive = False
        try:
            response = self._preflight(request) or await self._handler_of(request)(request, exchange)
        except Exception as error:
            response = self._failed(error, request.id)
        if response is not None:
            await exchange.finish(exchange.encode(response, request), self.config.client, request.id)

    def _handler_of(self, request: HttpRequest) -> Handler:
        """Raises NoRoute, and Failure if the client may not send the request."""
        if request.refusal is not None and not self.routes.reports_refusals(request.path):
            raise request.refusal
        return self.routes.find(request)

    def _preflight(self, request: HttpRequest) -> Response | None:
        """The response to a preflight request; None if it is not one, or its origin is not allowed."""
        if not self._is_asked_by_page(request):
            return None
        methods = self.routes.methods_of(request)
        return preflight(request, methods) if methods else None

    def _is_asked_by_page(self, request: HttpRequest) -> bool:
        """Whether it is the preflight request of a page whose origin is allowed."""
        return is_preflight(request) and ALLOW in request.shared

    def _failed(self, error: Exception, request_id: str) -> Response:
        match error:
            case Failure() as failure:
                response = error_response(failure, request_id, overload_status=self.config.overload_status)
                failure.clear_tracebacks()
                return response
            case NoRoute() as no_route:
                return no_route_response(no_route, request_id)
            case bug:
                return error_response(bug_failure(bug, request_id), request_id)

    def no_room(self, request: HttpRequest) -> Response:
        if self._shortage is not None:
            self._shortage.count_refused(request.path)
        return self._unanswered(request, no_room(self._rng))

    def closing(self, request: HttpRequest) -> Response:
        return self._unanswered(request, draining())

    def _unanswered(self, request: HttpRequest, failure: Failure) -> Response:
        """The response to a request that no handler sees."""
        request.id = request_id_of(request)
        request.shared = self._cors.headers_of(request)
        return error_response(failure, request.id, overload_status=self.config.overload_status)

    def on_paused(self) -> None:
        if self._shortage is not None:
            self._shortage.count_pause()

    def refusal(self, broken: BrokenHead, headers: Mapping[str, str]) -> tuple[HttpRequest, Response]:
        request = HttpRequest(method="", path="", headers=headers, keeps_alive=False)
        request.id = request_id_of(request)
        request.shared = self._cors.headers_of(request)
        response = error_response(Failure(Reason.INVALID_ARGUMENT, str(broken)), request.id)
        response.status = broken.status
        return request, response
