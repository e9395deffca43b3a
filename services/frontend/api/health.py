"""What tells others how a frontend is: `/live`, `/health`, `/metrics`."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.frontend.control import FrontendControl
from services.frontend.routing.rejection import of_registered
from services.http.errors import json_response
from services.http.router import Router
from services.http.server.connection import Connection
from services.http.server.messages import HttpRequest, Response


class State(Protocol):
    """How a frontend is."""

    def models(self) -> Sequence[ModelCard]:
        """Those that can be served now."""
        ...

    @property
    def unreached_count(self) -> int:
        """How many workers are registered that can't be sent requests."""
        ...

    @property
    def is_draining(self) -> bool: ...


class Ops:
    """For any application of a frontend."""

    def __init__(self, state: State, whole: FrontendControl) -> None:
        self._state = state
        self._whole = whole

    def add_to(self, routes: Router) -> None:
        """All of them."""
        routes.get("/live", self._live)
        routes.get("/health", self._health)
        routes.get("/metrics", self._expose)

    async def _live(self, request: HttpRequest, connection: Connection) -> Response:
        return json_response(b'{"status":"live"}')

    async def _health(self, request: HttpRequest, connection: Connection) -> Response:
        """Ready for requests? 503 says why not."""
        if self._state.is_draining:
            raise Failure(Reason.DRAINING, "this frontend is leaving and takes no new requests")
        if not (cards := self._state.models()):
            count = self._state.unreached_count
            why = f"no worker is reached, {of_registered(count)}" if count else "there is no worker at the moment"
            raise Failure(Reason.NO_WORKERS, f"no model can be served: {why}")
        return json_response(msgspec.json.encode({"status": "ready", "models": [card.model for card in cards]}))

    async def _expose(self, request: HttpRequest, connection: Connection) -> Response:
        return Response(await self._whole.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})
