"""The ways in which a request ends that nobody wants any more, of each kind that there is."""

from collections.abc import Callable

import aiohttp
import grpc

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.asks import Ask
from tests.integration.harness.plane import Frontend, Process
from tests.integration.harness.readings import Reading, read
from tests.integration.harness.visits import Visit

KINDS = {
    "grpc": Ask("grpc"),
    "completions stream": Ask("stream"),
    "completions unary": Ask("unary"),
    "chat stream": Ask("stream", is_chat=True),
    "chat unary": Ask("unary", is_chat=True),
    "two choices grpc": Ask("grpc", n=2),
    "two choices unary": Ask("unary", n=2),
}
CAUSES = {"leaves": "client_disconnect", "http": "explicit", "rpc": "explicit", "deadline": "deadline"}
"""How it ends, and as what that counts."""
CANCELLATIONS = "dynamo_frontend_model_cancellation_total"
DEADLINE_TIMES = 5


def deadline_s(took_s: float, least_s: float = 1.2) -> float:
    """Enough for a request to come into any state, where something that is as much work has just taken so long."""
    return max(least_s, DEADLINE_TIMES * took_s)


async def end(visit: Visit, way: str) -> None:
    """Have it ended in this way."""
    match way:
        case "leaves":
            visit.leave()
        case "http":
            assert await cancel_over_http(visit.frontend, visit.ask.request_id) == 1
        case "rpc":
            assert await cancel_over_grpc(visit.frontend, visit.ask.request_id) == 1
        case "deadline":
            assert (await visit.refusal()).is_deadline


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


async def check_told(visit: Visit, way: str) -> None:
    """One that did not hang up itself gets the reason."""
    if way == "leaves":
        return
    refused = await visit.refusal()
    assert refused.is_deadline if way == "deadline" else refused.reason == "CANCELLED", refused


async def reading_with(worker: Process, before: Reading, counted: Callable[[Reading], float]) -> Reading | None:
    """What the worker tells, once this count has grown."""
    after = await read(worker)
    return after if counted(after) > counted(before) else None
