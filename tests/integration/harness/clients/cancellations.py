"""The ways to end a request that its client no longer wants, and the kinds of requests to end."""

from collections.abc import Callable

import aiohttp
import grpc

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.clients.client import Client
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.metrics import Metrics, read_metrics
from tests.integration.harness.plane.processes import Frontend, Process
from tests.support.clock import WAIT_S

KINDS = {
    "grpc": Request("grpc"),
    "completions stream": Request("stream"),
    "completions unary": Request("unary"),
    "chat stream": Request("stream", is_chat=True),
    "chat unary": Request("unary", is_chat=True),
    "two choices grpc": Request("grpc", n=2),
    "two choices unary": Request("unary", n=2),
}
CAUSES = {"disconnect": "client_disconnect", "http": "explicit", "rpc": "explicit", "deadline": "deadline"}
"""How a request is ended, and the cause that metrics count for it."""
COUNTED_CAUSES = {ending: {cause} for ending, cause in CAUSES.items()} | {"deadline": {"deadline", "client_disconnect"}}
"""The causes that may be counted for it. Over gRPC a client's own timer may end the request. On a busy machine that can
be earlier than frontends take for a deadline (DEADLINE_TRAVEL_S), and then it is a client that leaves."""
CANCELLATIONS = "dynamo_frontend_model_cancellation_total"
DEADLINE_TIMES = 5


def deadline_s(took_s: float, least_s: float = 3.0) -> float:
    """Return a deadline that leaves time to reach any state, given how long comparable work has just taken."""
    return max(least_s, DEADLINE_TIMES * took_s)


async def end_request(client: Client, ending: str) -> None:
    """End the client's request in this way."""
    match ending:
        case "disconnect":
            client.hang_up()
        case "http":
            assert await cancel_over_http(client.frontend, client.request.request_id) == 1
        case "rpc":
            assert await cancel_over_grpc(client.frontend, client.request.request_id) == 1
        case "deadline":
            assert (await client.refusal()).is_deadline


async def cancel_over_http(frontend: Frontend, request_id: str) -> int:
    """Cancel by request id; return how many requests this ended."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}/v1/requests/{request_id}/cancel") as response,
    ):
        assert response.status == 200, await response.text()
        return int((await response.json())["cancelled"])


async def cancel_over_grpc(frontend: Frontend, request_id: str) -> int:
    """Cancel by request id; return how many requests this ended."""
    async with grpc.aio.insecure_channel(frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return int((await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id), timeout=WAIT_S)).cancelled)


def count_cancellations(metrics: Metrics, ending: str, **labels: str) -> float:
    """Return how many requests the frontend has counted that may have ended in this way."""
    return sum(metrics.sum(CANCELLATIONS, cause=cause, **labels) for cause in COUNTED_CAUSES[ending])


async def check_client_error(client: Client, ending: str) -> None:
    """Check that a client that did not hang up was told why its request ended."""
    if ending == "disconnect":
        return
    refused = await client.refusal()
    assert refused.is_deadline if ending == "deadline" else refused.reason == "CANCELLED", refused


async def metrics_if_grown(worker: Process, before: Metrics, counted: Callable[[Metrics], float]) -> Metrics | None:
    """Return the worker's metrics if this count has grown."""
    after = await read_metrics(worker)
    return after if counted(after) > counted(before) else None
