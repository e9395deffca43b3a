"""The `Inference.Generate` service on a real port, over a pipeline that a test controls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.core.call import Call
from services.core.common_layers import Accept
from services.core.flow.client_flow import ClientBounds
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Layer, Sink, Usage
from services.core.request import FinishReason, Request
from services.rpc.inference_service import DEFAULT_BOUNDS, InferenceService
from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.http.rpcs import serving_at
from tests.support.doubles import run_async

ANSWER = Finish(FinishReason.STOP, Usage(2, 3))


class SteppedPipeline:
    """A pipeline that waits for permission before each step, and records when it is cancelled."""

    def __init__(self, *deltas: Sequence[int], outcome: Finish | Exception = ANSWER) -> None:
        self._deltas = deltas
        self._outcome = outcome
        self.calls: list[Call] = []
        self.go = asyncio.Semaphore(0)
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.calls.append(call)
        self.began.set()
        position = len(request.generated_token_ids)
        try:
            for token_ids in self._deltas:
                await self.go.acquire()
                sink.deliver(Delta(position, token_ids, text="x" * len(token_ids), choice=request.choice))
                position += len(token_ids)
            await self.go.acquire()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if isinstance(self._outcome, Exception):
            raise self._outcome
        usage = Usage(2, position)
        reason = self._outcome.reason
        sink.deliver(Delta(position, (), choice=request.choice, finish_reason=reason, usage=usage))
        return Finish(reason, usage)


@asynccontextmanager
async def serving(
    pipeline: Layer,
    bounds: ClientBounds = DEFAULT_BOUNDS,
    kind: Callable[..., InferenceService] = InferenceService,
    options: Sequence[tuple[str, int]] = (),
) -> AsyncIterator[Any]:
    """Yield a client of a real server over `pipeline`, with a gate that can end requests, as every process has one.

    `options`: of the client's channel.
    """
    gate = Gate()
    service = kind(Accept(pipeline, gate), gate, bounds=bounds)
    async with (
        serving_at((inference_pb2_grpc.add_InferenceServicer_to_server, service), bounds=bounds) as address,
        grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options]) as channel,
    ):
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]


def generate_request(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(model="m", tokens=inference_pb2.TokenIds(ids=[1, 2]), **fields)


async def read_all(call: Any) -> tuple[list[Any], grpc.aio.AioRpcError | None]:
    """Return all items, and the error that ended the rpc, if any."""
    items: list[Any] = []
    try:
        while (item := await call.read()) is not grpc.aio.EOF:
            items.append(item)
    except grpc.aio.AioRpcError as error:
        return items, error
    return items, None


def generate(pipeline: Layer, **fields: Any) -> tuple[list[Any], grpc.aio.AioRpcError | None]:
    async def scenario() -> tuple[list[Any], grpc.aio.AioRpcError | None]:
        async with serving(pipeline) as stub:
            return await read_all(stub.Generate(generate_request(**fields)))

    return run_async(scenario())


def error_info(error: grpc.aio.AioRpcError | None) -> error_details_pb2.ErrorInfo:
    assert error is not None
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return info


def token_ids_of(items: Sequence[Any]) -> list[int]:
    return [token for item in items for token in item.delta.token_ids]


def unblocked_pipeline(*deltas: Sequence[int], outcome: Finish | Exception = ANSWER) -> SteppedPipeline:
    """Return a pipeline whose steps need no permission."""
    pipeline = SteppedPipeline(*deltas, outcome=outcome)
    for _ in range(len(deltas) + 1):
        pipeline.go.release()
    return pipeline
