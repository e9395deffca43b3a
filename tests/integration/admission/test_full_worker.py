"""A full worker refuses every request for a slot, on every path, and still answers all other calls.

| workload | nemesis | checker |
| --- | --- | --- |
| a new frontend, health, metrics and cancel calls | the only slot is taken | all are answered |
| requests to the worker itself | a limit of one | the same limit as through a frontend |
"""

import asyncio

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import refusal, refusal_from
from tests.integration.harness.metrics import wait_idle, wait_load
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S

pytestmark = on_both_engines

LIMITS = ("--engine-request-limit=1", "--request-queue-limit=0")


def test_full_worker_still_answers_calls_that_need_no_slot(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        worker = await plane.worker(*LIMITS)
        async with asyncio.TaskGroup() as group:
            holder = Client(plane.frontend, Request("grpc", max_tokens=ENDLESS)).start(group)
            await until(lambda: holder.has_begun)
            another = plane.start_frontend()
            await until(lambda: another.has_found(worker))
            assert await refusal(another, Request("grpc"))
            async with grpc.aio.insecure_channel(worker.ready["address"]) as channel:
                health = await HealthStub(channel).Check(HealthCheckRequest(), timeout=WAIT_S)
                assert health.status == HealthCheckResponse.SERVING
                stub = inference_pb2_grpc.InferenceStub(channel)
                assert (
                    await stub.Cancel(inference_pb2.CancelRequest(request_id="nobody"), timeout=WAIT_S)
                ).cancelled == 0
            assert (await wait_load(worker, 1, 0)).sum("unbroken_engine_steps_total") > 0
            holder.hang_up()

    asyncio.run(scenario())


def test_direct_calls_to_a_worker_meet_the_same_limits(start_plane: Start) -> None:
    plane = start_plane()
    message = inference_pb2.GenerateRequest(model="mocker")
    message.tokens.ids.append(32)

    async def scenario() -> None:
        worker = await plane.worker(*LIMITS)
        async with grpc.aio.insecure_channel(worker.ready["address"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            holder = stub.Generate(message, timeout=30)
            await holder.read()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(message, timeout=30).read()
            assert await refusal(plane.frontend, Request("grpc"))
            holder.cancel()
        assert refusal_from(refused.value).reason == "WORKER_AT_CAPACITY"
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())
