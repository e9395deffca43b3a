"""`/busy_threshold`: read and set busy thresholds over HTTP."""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.core.bounded_executor import BoundedExecutor
from services.core.errors import invalid, quoted
from services.core.json.text import readable
from services.frontend.api.admin.admin import Admin
from services.frontend.api.field_types import BlocksThreshold, NotEmpty, TokensThreshold
from services.frontend.routing.thresholds import THRESHOLDS, Thresholds
from services.http.decompress import body_of
from services.http.errors import json_response
from services.http.json_decode import FIELD_NAME_CHARACTERS_MAX, decode, fields_of
from services.http.router import Router
from services.http.server.exchange import Exchange
from services.http.server.messages import HttpRequest, Response

PATH = "/busy_threshold"
BODY_BYTES_MAX = 64 * 1024

AdmissionControl = Literal["none", "token-capacity"]


class ThresholdsChange(Struct, forbid_unknown_fields=True):
    """The body of POST. A field that is left out stays as it is; null disables the threshold."""

    model: NotEmpty
    active_decode_blocks_threshold: BlocksThreshold | UnsetType | None = UNSET
    active_prefill_tokens_threshold: TokensThreshold | UnsetType | None = UNSET


class ModelThresholds(Struct, kw_only=True):
    """null: the threshold is disabled."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None


class ChangedThresholds(ModelThresholds, kw_only=True):
    """The thresholds of the model after the change. admission_control: with none, they refuse nothing."""

    admission_control: AdmissionControl


class AllThresholds(Struct, kw_only=True):
    """The thresholds of all models. admission_control: with none, they refuse nothing."""

    thresholds: list[ModelThresholds]
    admission_control: AdmissionControl


_CHANGE = msgspec.json.Decoder(ThresholdsChange)


class AdminRoutes:
    """The routes of the admin API, for an application of their own or for the clients' one."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._executor = BoundedExecutor()

    def add_to(self, routes: Router) -> None:
        """Register the routes and their guard."""
        routes.guard(PATH, self._guard)
        routes.get(PATH, self._list)
        routes.post(PATH, self._set)

    def _guard(self, request: HttpRequest) -> None:
        """Raises UNAUTHENTICATED without the token, and for pages in a browser."""
        self._admin.authorize(request.headers.get("authorization"), request.headers.get("origin"))

    async def _list(self, request: HttpRequest, exchange: Exchange) -> Response:
        listed = [_model_thresholds(model, thresholds) for model, thresholds in self._admin.thresholds()]
        answer = AllThresholds(thresholds=listed, admission_control=self._admission_control)
        return json_response(msgspec.json.encode(answer))

    async def _set(self, request: HttpRequest, exchange: Exchange) -> Response:
        change = _parse(await body_of(request, BODY_BYTES_MAX, self._executor))
        given = {name: getattr(change, name) for name in THRESHOLDS}
        changes = {name: value for name, value in given.items() if value is not UNSET}
        thresholds = await self._admin.set_thresholds(change.model, changes)
        answer = ChangedThresholds(
            model=change.model,
            active_decode_blocks_threshold=thresholds.active_decode_blocks,
            active_prefill_tokens_threshold=thresholds.active_prefill_tokens,
            admission_control=self._admission_control,
        )
        return json_response(msgspec.json.encode(answer))

    @property
    def _admission_control(self) -> AdmissionControl:
        return "token-capacity" if self._admin.is_acting else "none"


def _parse(body: bytes) -> ThresholdsChange:
    """Raises INVALID_ARGUMENT."""
    body = readable(body)
    for name in fields_of(body):
        if name not in ThresholdsChange.__struct_fields__:
            known = ", ".join(ThresholdsChange.__struct_fields__)
            raise invalid(name[:FIELD_NAME_CHARACTERS_MAX], f"{quoted(name)} is not a field of this call: use {known}")
    return decode(body, _CHANGE)


def _model_thresholds(model: str, thresholds: Thresholds) -> ModelThresholds:
    return ModelThresholds(
        model=model,
        active_decode_blocks_threshold=thresholds.active_decode_blocks,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens,
    )
