"""Interceptors: a request that cannot be decoded is refused as the client's fault."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.core.errors import Reason
from services.core.gate import Gate
from services.rpc.inference_service import InferenceService
from services.rpc.server import GrpcServer
from services.rpc.status import failure_of
from services.stubs import inference_pb2_grpc
from tests.support.doubles import Script, run_async

GARBAGE = b"\xff\xff\xff\xff"


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[grpc.aio.Channel]:
    async with GrpcServer(["unbroken.v1.Inference"]) as server:
        inference_pb2_grpc.add_InferenceServicer_to_server(InferenceService(script, Gate()), server.server)
        async with grpc.aio.insecure_channel(await server.start("127.0.0.1:0")) as channel:
            yield channel


@pytest.mark.parametrize(
    ("method", "kind"),
    [("/unbroken.v1.Inference/Generate", "unary_stream"), ("/grpc.health.v1.Health/Check", "unary_unary")],
    ids=["a stream of answers", "one answer"],
)
def test_undecodable_request_is_an_invalid_argument(method: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> grpc.aio.AioRpcError:
        async with serving(Script()) as channel:
            call: Any = getattr(channel, kind)(method)(GARBAGE)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call.read() if kind == "unary_stream" else call)
            return caught.value

    error = run_async(scenario())

    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert failure_of(error, otherwise=Reason.INTERNAL).reason is Reason.INVALID_ARGUMENT
    assert not caplog.records
