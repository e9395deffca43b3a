"""`/busy_threshold`: what operators may read and set over HTTP."""

from typing import Any

import msgspec
from aiohttp import web

from services.errors import invalid
from services.frontend.admin import Admin
from services.frontend.busy import THRESHOLDS, Thresholds
from services.frontend.http.body import read_body
from services.frontend.http.config import CONFIG, HttpConfig
from services.frontend.http.decoding import FIELD_NAME_CHARACTERS_MAX, decode, fields_of
from services.frontend.http.errors import json_response
from services.frontend.http.ops import Ops, State
from services.frontend.http.respond import Handler, Respond
from services.frontend.whole import Whole

PATH = "/busy_threshold"
BODY_BYTES_MAX = 64 * 1024


class _Change(msgspec.Struct, forbid_unknown_fields=True):
    """A body of POST. UNSET: left as it is. None: not looked at any more."""

    model: str
    active_decode_blocks_threshold: float | msgspec.UnsetType | None = msgspec.UNSET
    active_prefill_tokens_threshold: int | msgspec.UnsetType | None = msgspec.UNSET


class AdminRoutes:
    """For an application of its own, or for that of clients."""

    def __init__(self, admin: Admin, config: HttpConfig) -> None:
        self._admin = admin
        self._config = config

    def add_to(self, app: web.Application) -> None:
        """Answer them there. Its Respond must be among its middlewares already."""
        app.middlewares.append(self._guard)
        app.add_routes([web.get(PATH, self._list), web.post(PATH, self._set)])

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Keeps strangers out, before anything else is looked at. Raises UNAUTHENTICATED."""
        if request.path == PATH:
            self._admin.authorize(request.headers.get("Authorization"))
        return await handler(request)

    async def _list(self, request: web.Request) -> web.Response:
        listed = [_named(model, thresholds) for model, thresholds in self._admin.thresholds()]
        return self._answer({"thresholds": listed})

    async def _set(self, request: web.Request) -> web.Response:
        read_s_max = self._config.body_read_s_max
        change = _parse(await read_body(request, bytes_max=BODY_BYTES_MAX, read_s_max=read_s_max))
        given = {name: getattr(change, name) for name in THRESHOLDS}
        changes = {name: value for name, value in given.items() if value is not msgspec.UNSET}
        return self._answer(_named(change.model, await self._admin.set_thresholds(change.model, changes)))

    def _answer(self, body: dict[str, Any]) -> web.Response:
        control = "token-capacity" if self._admin.is_acting else "none"
        return json_response(msgspec.json.encode(body | {"admission_control": control}))


def build_admin_app(admin: Admin, state: State, whole: Whole, config: HttpConfig) -> web.Application:
    """An application of admin calls alone, with health and metrics, for an address of its own."""
    respond = Respond(config, lambda: state.is_draining)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[respond.middleware])
    app[CONFIG] = config
    app.add_routes(Ops(state, whole).routes())
    AdminRoutes(admin, config).add_to(app)
    return app


def _parse(body: bytes) -> _Change:
    """Raises INVALID_ARGUMENT."""
    for name in fields_of(body):
        if name not in _Change.__struct_fields__:
            known = ", ".join(_Change.__struct_fields__)
            raise invalid(name[:FIELD_NAME_CHARACTERS_MAX], f"{name[:40]!r} is no field of this call: it has {known}")
    return decode(body, _Change)


def _named(model: str, thresholds: Thresholds) -> dict[str, Any]:
    """As in answers."""
    return {"model": model, **{name: getattr(thresholds, field) for name, field in THRESHOLDS.items()}}
