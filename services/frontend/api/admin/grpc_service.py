"""The gRPC service `Admin`, and the interceptor that checks the token of its calls."""

from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_status import rpc_status

from services.core.errors import Failure, invalid, quoted
from services.frontend.api.admin.admin import Admin
from services.frontend.routing.thresholds import THRESHOLDS, Thresholds
from services.http.grpc.metadata import Metadata, RpcError
from services.rpc.status import abort, status_of
from services.stubs import admin_pb2, admin_pb2_grpc

SERVICE = "unbroken.v1.Admin"
AUTHORIZATION = "authorization"
ORIGIN = "origin"
Context = grpc.aio.ServicerContext[Any, Any]


class AdminTokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses admin calls without the token before the request is read, so that nothing else is disclosed."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method.startswith(f"/{SERVICE}/"):
            try:
                self._admin.authorize(_authorization(handler_call_details))
            except Failure as failure:
                return _refusing(failure)
        return await continuation(handler_call_details)


def admin_guard(admin: Admin) -> Callable[[Metadata], None]:
    """The same for our own server: it refuses admin calls without the token before the request is read."""

    def check(metadata: Metadata) -> None:
        given = {name: value for name, value in metadata if isinstance(value, str)}
        try:
            admin.authorize(given.get(AUTHORIZATION), given.get(ORIGIN))
        except Failure as failure:
            status = rpc_status.to_status(status_of(failure))
            raise RpcError(status.code, status.details, trailing=status.trailing_metadata) from None

    return check


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    given = dict(details.invocation_metadata).get(AUTHORIZATION)
    return given if isinstance(given, str) else None


def _refusing(failure: Failure) -> "grpc.RpcMethodHandler[bytes, bytes]":
    async def refuse(_: bytes, context: Context) -> bytes:
        await abort(context, failure)

    return grpc.unary_unary_rpc_method_handler(refuse)


class AdminService(admin_pb2_grpc.AdminServicer):
    """See admin.proto. Needs an AdminTokenInterceptor on its server."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def ListBusyThresholds(  # noqa: N802
        self, request: admin_pb2.ListBusyThresholdsRequest, context: Context
    ) -> admin_pb2.ListBusyThresholdsResponse:
        """See admin.proto."""
        thresholds = [_to_wire(model, thresholds) for model, thresholds in self._admin.thresholds()]
        return admin_pb2.ListBusyThresholdsResponse(thresholds=thresholds, admission_control=self._control)

    async def SetBusyThreshold(  # noqa: N802
        self, request: admin_pb2.SetBusyThresholdRequest, context: Context
    ) -> admin_pb2.SetBusyThresholdResponse:
        """See admin.proto."""
        model = request.threshold.model
        try:
            if not model:
                raise invalid("threshold.model", "threshold.model is missing: name the model")
            self._admin.thresholds_of(model)  # An unknown model is reported before a wrong mask.
            thresholds = await self._admin.set_thresholds(model, _changes(request))
        except Failure as failure:
            await abort(context, failure)
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
