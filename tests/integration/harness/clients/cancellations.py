"""The ways in which a request ends that nobody wants any more, of each kind that there is."""

from collections.abc import Callable

import aiohttp
import grpc

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.clients.client import Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.metrics import Metrics, read_metrics
from tests.integration.harness.plane.processes import Frontend, Process

KINDS = {
    "grpc": Request("grpc"),
    "completions stream": Request("stream"),
    "completions unary": Request("unary"),
    "chat stream": Request("stream", is_chat=True),
    "chat unary": Request("unary", is_chat=True),
    "two choices grpc": Request("grpc", n=2),
    "two choices unary": Request("unary", n=2),
}
CAUSES = {"leaves": "client_disconnect", "http": "explicit", "rpc": "explicit", "deadline": "deadline"}
"""How it ends, and as what that counts."""
CANCELLATIONS = "dynamo_frontend_model_cancellation_total"
DEADLINE_TIMES = 5


def deadline_s(took_s: float, least_s: float = 1.2) -> float:
    """Enough for a request to come into any state, where something that is as much work has just taken so long."""
    return max(least_s, DEADLINE_TIMES * took_s)


async def end_request(client: Client, ending: str) -> None:
    """Have it ended in this way."""
    match ending:
        case "leaves":
            client.hang_up()
        case "http":
            assert await cancel_over_http(client.frontend, client.request.request_id) == 1
        case "rpc":
            assert await cancel_over_grpc(client.frontend, client.request.request_id) == 1
        case "deadline":
            assert (await client.refusal()).is_deadline


async def cancel_over_http(frontend: Frontend, request_id: str) -> int:
    """How many requests that ended."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}/v1/requests/{request_id}/cancel") as response,
    ):
        assert response.status == 200, await response.text()
        return int((await response.json())["cancelled"])


async def cancel_over_grpc(frontend: Frontend, request_id: str) -> int:
    """The same."""
    async with grpc.aio.insecure_channel(frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return int((await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=5)).cancelled)


async def check_client_error(client: Client, ending: str) -> None:
    """One that did not hang up itself gets the reason."""
    if ending == "leaves":
        return
    refused = await client.refusal()
    assert refused.is_deadline if ending == "deadline" else refused.reason == "CANCELLED", refused


async def metrics_if_grown(worker: Process, before: Metrics, counted: Callable[[Metrics], float]) -> Metrics | None:
    """What the worker tells, once this count has grown."""
    after = await read_metrics(worker)
    return after if counted(after) > counted(before) else None
