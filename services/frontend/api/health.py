"""The state of a frontend over HTTP: `/live`, `/health`, `/metrics`."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.frontend.control import FrontendControl
from services.frontend.model_catalog import NO_VIEW
from services.frontend.routing.rejection import of_registered
from services.http.errors import json_response
from services.http.ops_server import exposition_response
from services.http.router import Router
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response


class Live(Struct, kw_only=True):
    """The body of /live."""

    status: Literal["live"]


class Ready(Struct, kw_only=True):
    """The body of /health. models: those that can be served now; absent where clients need keys."""

    status: Literal["ready"]
    models: list[str] | UnsetType = UNSET


_LIVE = msgspec.json.encode(Live(status="live"))


class FrontendState(Protocol):
    """What `/health` reports."""

    def models(self) -> Sequence[ModelCard]:
        """The models that can be served now."""
        ...

    @property
    def has_view(self) -> bool:
        """Whether a registry has ever answered."""
        ...

    @property
    def unreached_count(self) -> int:
        """How many workers are registered but not connected."""
        ...

    @property
    def is_draining(self) -> bool: ...


class HealthRoutes:
    """The routes that every application of a frontend has."""

    def __init__(self, state: FrontendState, control: FrontendControl, *, names_models: bool = True) -> None:
        """`names_models`: whether everybody may know which models there are."""
        self._state = state
        self._control = control
        self._names_models = names_models

    def add_to(self, routes: Router) -> None:
        """Register the routes."""
        routes.get("/live", self._live)
        routes.get("/health", self._health)
        routes.get("/metrics", self._metrics)
        for path in ("/live", "/health", "/metrics"):
            routes.open(path)

    async def _live(self, request: HttpRequest, exchange: Exchange) -> Response:
        return json_response(_LIVE)

    async def _health(self, request: HttpRequest, exchange: Exchange) -> Response:
        """200 if requests can be served. Raises Failure, which becomes a 503 with the reason, if not."""
        if self._state.is_draining:
            raise Failure(Reason.DRAINING, "this frontend is shutting down and takes no new requests")
        if not (cards := self._state.models()):
            raise Failure(Reason.NO_WORKERS, f"no model can be served: {self._why_none()}")
        models = [card.model for card in cards] if self._names_models else UNSET
        return json_response(msgspec.json.encode(Ready(status="ready", models=models)))

    def _why_none(self) -> str:
        if not self._state.has_view:
            return NO_VIEW
        count = self._state.unreached_count
        return f"no worker is connected {of_registered(count)}" if count else "there is no worker at present"

    async def _metrics(self, request: HttpRequest, exchange: Exchange) -> Response:
        return exposition_response(await self._control.exposition())
