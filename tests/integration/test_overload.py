"""N requests run, Q wait, and each one more is refused at once, as clients and metrics see it from outside.

| workload | nemesis | checker |
| --- | --- | --- |
| 50 requests at a time, HTTP streamed and unary or gRPC | limits N and Q far below | N + Q answers, the rest refused |
"""

import asyncio

import pytest

from tests.integration.answers import Answer, Refused
from tests.integration.asks import Ask
from tests.integration.clients import answer, gathered, outcome
from tests.integration.conftest import Start
from tests.integration.plane import Plane, Process, until

REQUESTS = 50
ITL_MS = 20
MIX = {"http": ("stream", "unary"), "grpc": ("grpc",)}


async def watch(worker: Process, stop: asyncio.Event) -> tuple[set[float], set[float]]:
    """All values that the gauges of running and waiting requests showed until `stop`."""
    running, waiting = set(), set()
    while not stop.is_set():
        running.add(await worker.metric("dynamo_engine_request"))
        waiting.add(await worker.metric("dynamo_request_queue"))
    return running, waiting


def check_refusal(refused: Refused) -> None:
    """It says what happened, to programs and to people, and when to try again."""
    assert refused.reason in ("WORKER_AT_CAPACITY", "OVERLOADED")
    assert "at capacity" in refused.error["message"]
    if refused.code == "RESOURCE_EXHAUSTED":
        assert refused.error["retryable"] == "true"
        assert refused.error["retry_after_s"] > 0
    else:
        assert refused.code == 503
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.error["type"] == "overloaded_error"
        assert refused.error["retryable"] is True


@pytest.mark.parametrize("protocols", MIX.values(), ids=MIX.keys())
@pytest.mark.parametrize(("slots", "places"), [(2, 3), (2, 0), (2, 1)])
def test_exactly_what_fits_is_admitted(start_plane: Start, slots: int, places: int, protocols: tuple[str, ...]) -> None:
    plane = start_plane()
    asks = [Ask(protocols[number % len(protocols)], seed=number, max_tokens=20) for number in range(REQUESTS)]

    async def scenario() -> None:
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await plane.worker(*limits, f"--mocker-itl-ms={ITL_MS}")
        undisturbed = await answer(plane.frontend, asks[0])
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch(worker, stop))
            outcomes = await gathered(outcome(plane.frontend, ask) for ask in asks)
            stop.set()

        refusals = [one for one in outcomes if isinstance(one, Refused)]
        assert len(refusals) == REQUESTS - slots - places
        assert all(one == undisturbed for one in outcomes if isinstance(one, Answer))
        for refused in refusals:
            check_refusal(refused)
        running, waiting = watching.result()
        assert max(running) == slots
        assert max(waiting) == places
        await check_quiet(plane, worker)
        assert await answer(plane.frontend, asks[0]) == undisturbed

    asyncio.run(scenario())


async def check_quiet(plane: Plane, worker: Process) -> None:
    """All gauges go back to 0."""
    await until(lambda: is_zero(worker, "dynamo_engine_request"))
    await until(lambda: is_zero(worker, "dynamo_request_queue"))
    await until(lambda: is_zero(plane.frontend, "dynamo_frontend_inflight_requests"))


async def is_zero(process: Process, gauge: str) -> bool:
    return await process.metric(gauge) == 0
