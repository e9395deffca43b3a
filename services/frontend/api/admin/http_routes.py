"""`/busy_threshold`: what operators may read and set over HTTP."""

from typing import Any

import msgspec

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import Failure, Reason, invalid, quoted
from services.frontend.api.admin.admin import Admin
from services.frontend.api.field_types import BlocksThreshold, NotEmpty, TokensThreshold
from services.frontend.routing.thresholds import THRESHOLDS, Thresholds
from services.http.decompress import body_of
from services.http.errors import json_response
from services.http.json_decode import FIELD_NAME_CHARACTERS_MAX, decode, fields_of
from services.http.router import Router
from services.http.server.connection import Connection
from services.http.server.messages import HttpRequest, Response

PATH = "/busy_threshold"
BODY_BYTES_MAX = 64 * 1024


class ThresholdsChange(msgspec.Struct, forbid_unknown_fields=True):
    """A body of POST. UNSET: left as it is. None: not looked at any more."""

    model: NotEmpty
    active_decode_blocks_threshold: BlocksThreshold | msgspec.UnsetType | None = msgspec.UNSET
    active_prefill_tokens_threshold: TokensThreshold | msgspec.UnsetType | None = msgspec.UNSET


_CHANGE = msgspec.json.Decoder(ThresholdsChange)


class AdminRoutes:
    """For an application of its own, or for that of clients."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._executor = BoundedExecutor()

    def add_to(self, routes: Router) -> None:
        """Answer them there."""
        routes.guard(PATH, self._guard)
        routes.get(PATH, self._list)
        routes.post(PATH, self._set)

    def _guard(self, request: HttpRequest) -> None:
        """Raises UNAUTHENTICATED. Pages in a browser are strangers: it lets them post without asking us."""
        if (origin := request.headers.get("origin")) is not None:
            detail = f"admin calls are not for pages in a browser, and this one comes from {quoted(origin)}"
            raise Failure(Reason.UNAUTHENTICATED, detail)
        self._admin.authorize(request.headers.get("authorization"))

    async def _list(self, request: HttpRequest, connection: Connection) -> Response:
        listed = [_named(model, thresholds) for model, thresholds in self._admin.thresholds()]
        return self._answer({"thresholds": listed})

    async def _set(self, request: HttpRequest, connection: Connection) -> Response:
        change = _parse(await body_of(request, BODY_BYTES_MAX, self._executor))
        given = {name: getattr(change, name) for name in THRESHOLDS}
        changes = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        return self._answer(_named(change.model, await self._admin.set_thresholds(change.model, changes)))

    def _answer(self, body: dict[str, Any]) -> Response:
        control = "token-capacity" if self._admin.is_acting else "none"
        return json_response(msgspec.json.encode(body | {"admission_control": control}))


def _parse(body: bytes) -> ThresholdsChange:
    """Raises INVALID_ARGUMENT."""
    for name in fields_of(body):
        if name not in ThresholdsChange.__struct_fields__:
            known = ", ".join(ThresholdsChange.__struct_fields__)
            raise invalid(name[:FIELD_NAME_CHARACTERS_MAX], f"{quoted(name)} is no field of this call: it has {known}")
    return decode(body, _CHANGE)


def _named(model: str, thresholds: Thresholds) -> dict[str, Any]:
    """As in answers."""
    return {"model": model, **{name: getattr(thresholds, field) for name, field in THRESHOLDS.items()}}
