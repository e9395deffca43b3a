"""The gRPC service Admin changes the fields that the mask names; calls without the token learn nothing else."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.core.errors import Failure, Reason
from services.frontend.api.admin.admin import Admin, AdminConfig
from services.frontend.api.admin.grpc_service import SERVICE, AdminService, admin_guard
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.rpc.status import CHANNEL_OPTIONS, failure_of
from services.stubs import admin_pb2, admin_pb2_grpc
from tests.frontend.support import alone
from tests.http.rpcs import serving_at
from tests.support.doubles import models_of, run_async

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
CONFIGURED = Thresholds(active_decode_blocks=0.5, active_prefill_tokens=100)


@asynccontextmanager
async def serving(*, token: str | None = None, is_on: bool = True) -> AsyncIterator[grpc.aio.Channel]:
    thresholds = BusyThresholds(AdmissionConfig(is_on=is_on, thresholds=CONFIGURED))
    admin = Admin(AdminConfig(token=token), models_of(), thresholds, alone(thresholds))
    async with (
        serving_at(
            (admin_pb2_grpc.add_AdminServicer_to_server, AdminService(admin)), guards={SERVICE: admin_guard(admin)}
        ) as address,
        grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel,
    ):
        yield channel


def threshold(decode: float | None = None, prefill: int | None = None, model: str = "m") -> admin_pb2.BusyThreshold:
    return admin_pb2.BusyThreshold(
        model=model, active_decode_blocks_threshold=decode, active_prefill_tokens_threshold=prefill
    )


def change(*paths: str, **values: Any) -> admin_pb2.SetBusyThresholdRequest:
    request = admin_pb2.SetBusyThresholdRequest(threshold=threshold(**values))
    request.update_mask.paths.extend(paths)
    return request


def ask(method: str, request: Any, *, metadata: Any = (), **options: Any) -> Any:
    """The answer to one call. Raises Failure."""

    async def scenario() -> Any:
        async with serving(**options) as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
            try:
                return await getattr(stub, method)(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                raise failure_of(error, otherwise=Reason.INTERNAL) from error

    return run_async(scenario())


@pytest.mark.parametrize(
    ("is_on", "control"),
    [(True, admin_pb2.ADMISSION_CONTROL_TOKEN_CAPACITY), (False, admin_pb2.ADMISSION_CONTROL_NONE)],
)
def test_list_has_the_thresholds_and_whether_they_act(is_on: bool, control: int) -> None:
    answer = ask("ListBusyThresholds", admin_pb2.ListBusyThresholdsRequest(), is_on=is_on)

    assert list(answer.thresholds) == [threshold(0.5, 100)]
    assert answer.admission_control == control


@pytest.mark.parametrize(
    ("request_", "decode", "prefill"),
    [
        (change(DECODE, decode=0.25), 0.25, 100),
        (change(PREFILL, prefill=7), 0.5, 7),
        (change(DECODE, PREFILL, decode=0.25), 0.25, None),
        (change(PREFILL, decode=0.25), 0.5, None),
    ],
    ids=["one", "the other", "named and absent", "given and not named"],
)
def test_set_changes_the_fields_that_the_mask_names(request_: Any, decode: float, prefill: int | None) -> None:
    answer = ask("SetBusyThreshold", request_)

    assert answer.threshold == threshold(decode, prefill)
    assert answer.admission_control == admin_pb2.ADMISSION_CONTROL_TOKEN_CAPACITY


@pytest.mark.parametrize(
    ("request_", "reason", "param"),
    [
        (change(decode=0.25), Reason.INVALID_ARGUMENT, "update_mask"),
        (change("model"), Reason.INVALID_ARGUMENT, "update_mask"),
        (change(DECODE, "x" * 10_000), Reason.INVALID_ARGUMENT, "update_mask"),
        (change(DECODE, decode=1.5), Reason.INVALID_ARGUMENT, DECODE),
        (change(DECODE, decode=float("nan")), Reason.INVALID_ARGUMENT, DECODE),
        (change(DECODE, model="made up"), Reason.MODEL_NOT_FOUND, "model"),
        (change(model="made up"), Reason.MODEL_NOT_FOUND, "model"),
        (change(model=""), Reason.INVALID_ARGUMENT, "threshold.model"),
    ],
)
def test_invalid_field_is_named(request_: Any, reason: Reason, param: str) -> None:
    with pytest.raises(Failure) as caught:
        ask("SetBusyThreshold", request_)

    assert (caught.value.reason, caught.value.param) == (reason, param)


# Calls without the token


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer other"),), (("authorization-bin", b"\xff"),)])
def test_call_without_the_token_is_refused(metadata: Any) -> None:
    with pytest.raises(Failure) as caught:
        ask("ListBusyThresholds", admin_pb2.ListBusyThresholdsRequest(), token="secret", metadata=metadata)

    assert caught.value.reason is Reason.UNAUTHENTICATED


def test_call_with_the_token_is_served() -> None:
    metadata = (("authorization", "Bearer secret"),)

    assert ask("ListBusyThresholds", admin_pb2.ListBusyThresholdsRequest(), token="secret", metadata=metadata)


@pytest.mark.parametrize("method", ["SetBusyThreshold", "NoSuchMethod"])
def test_refusal_of_a_call_without_the_token_mentions_nothing_else(method: str) -> None:
    async def scenario() -> grpc.StatusCode:
        async with serving(token="secret") as channel:
            call: Any = channel.unary_unary(f"/{SERVICE}/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"\xff no message")
        return caught.value.code()

    assert run_async(scenario()) is grpc.StatusCode.UNAUTHENTICATED
