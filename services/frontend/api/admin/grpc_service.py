"""The gRPC service `Admin`, and the guard that checks the token of its calls."""

from collections.abc import Mapping
from typing import Any

from services.core.errors import invalid, quoted
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.api.admin.admin import Admin
from services.frontend.routing.thresholds import THRESHOLDS, Thresholds
from services.http.grpc.routes import Guard
from services.stubs import admin_pb2, admin_pb2_grpc

SERVICE = "unbroken.v1.Admin"
AUTHORIZATION = "authorization"
ORIGIN = "origin"


def admin_guard(admin: Admin) -> Guard:
    """Refuses calls without the token before the request is read, so that nothing else is disclosed."""

    def check(headers: Mapping[str, str]) -> Tenant:
        admin.authorize(headers.get(AUTHORIZATION), headers.get(ORIGIN))
        return EVERYBODY

    return check


class AdminService(admin_pb2_grpc.AdminServicer):
    """See admin.proto. Needs an `admin_guard` on its server."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def ListBusyThresholds(  # noqa: N802
        self, request: admin_pb2.ListBusyThresholdsRequest, _context: object
    ) -> admin_pb2.ListBusyThresholdsResponse:
        """See admin.proto."""
        thresholds = [_to_wire(model, thresholds) for model, thresholds in self._admin.thresholds()]
        return admin_pb2.ListBusyThresholdsResponse(thresholds=thresholds, admission_control=self._control)

    async def SetBusyThreshold(  # noqa: N802
        self, request: admin_pb2.SetBusyThresholdRequest, _context: object
    ) -> admin_pb2.SetBusyThresholdResponse:
        """See admin.proto."""
        model = request.threshold.model
        if not model:
            raise invalid("threshold.model", "threshold.model is missing: name the model")
        self._admin.thresholds_of(model)  # An unknown model is reported before a wrong mask.
        thresholds = await self._admin.set_thresholds(model, _changes(request))
        threshold = _to_wire(model, thresholds)
        return admin_pb2.SetBusyThresholdResponse(threshold=threshold, admission_control=self._control)

    @property
    def _control(self) -> admin_pb2.AdmissionControl:
        if self._admin.is_acting:
            return admin_pb2.ADMISSION_CONTROL_TOKEN_CAPACITY
        return admin_pb2.ADMISSION_CONTROL_NONE


def _changes(request: admin_pb2.SetBusyThresholdRequest) -> Mapping[str, Any]:
    """The fields that the mask names, with their values. Raises Failure(INVALID_ARGUMENT)."""
    paths = request.update_mask.paths
    if not paths or not set(paths) <= set(THRESHOLDS):
        given = "no field" if not paths else quoted(", ".join(sorted(set(paths) - set(THRESHOLDS))))
        raise invalid("update_mask", f"update_mask names {given}: it may name {' and '.join(THRESHOLDS)}")
    threshold = request.threshold
    return {path: getattr(threshold, path) if threshold.HasField(path) else None for path in paths}


def _to_wire(model: str, thresholds: Thresholds) -> admin_pb2.BusyThreshold:
    return admin_pb2.BusyThreshold(
        model=model,
        active_decode_blocks_threshold=thresholds.active_decode_blocks,
        active_prefill_tokens_threshold=thresholds.active_prefill_tokens,
    )
