"""A client that leaves costs the engine nothing more, wherever its request is.

| workload | nemesis | checker |
| --- | --- | --- |
| an endless request, on the engine or in the queue | its client leaves | gauges 0, the engine stands still |
"""

import asyncio

import pytest

from tests.integration.asks import PROTOCOLS, Ask
from tests.integration.clients import answer
from tests.integration.conftest import Start
from tests.integration.plane import Plane, Process, until

ENDLESS = 100_000


@pytest.fixture(scope="module")
def narrow(start_plane: Start) -> tuple[Plane, Process]:
    """A plane whose only worker runs one request at a time."""
    plane = start_plane()
    return plane, asyncio.run(plane.worker("--engine-request-limit=1", "--mocker-itl-ms=2"))


async def has(worker: Process, gauge: str, value: int) -> bool:
    return await worker.metric(gauge) == value


async def stands_still(worker: Process) -> bool:
    """Has the engine made no step between two looks? With work to do it makes one every 2 ms."""
    before = await worker.metric("unbroken_engine_steps_total")
    await asyncio.sleep(0.05)
    return await worker.metric("unbroken_engine_steps_total") == before


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_engine_stops_when_the_client_is_gone(narrow: tuple[Plane, Process], protocol: str) -> None:
    plane, worker = narrow

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(answer(plane.frontend, Ask(protocol, max_tokens=ENDLESS)))
            await until(lambda: has(worker, "dynamo_engine_request", 1))
            assert not await stands_still(worker)
            leaving.cancel()
            await until(lambda: has(worker, "dynamo_engine_request", 0))
            await until(lambda: stands_still(worker))

    asyncio.run(scenario())
    assert not plane.frontend.events(level="error")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_client_that_leaves_the_queue_leaves_its_place_to_the_next(
    narrow: tuple[Plane, Process], protocol: str
) -> None:
    plane, worker = narrow

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(answer(plane.frontend, Ask(max_tokens=ENDLESS)))
            await until(lambda: has(worker, "dynamo_engine_request", 1))
            queued = group.create_task(answer(plane.frontend, Ask(protocol, max_tokens=ENDLESS)))
            await until(lambda: has(worker, "dynamo_request_queue", 1))
            queued.cancel()
            await until(lambda: has(worker, "dynamo_request_queue", 0))
            assert await has(worker, "dynamo_engine_request", 1)
            running.cancel()
            await until(lambda: stands_still(worker))

    asyncio.run(scenario())


def test_what_clients_left_is_counted_as_cancelled(narrow: tuple[Plane, Process]) -> None:
    plane, worker = narrow

    async def cancelled() -> float:
        return await plane.frontend.metric("dynamo_frontend_requests_total", error_type="CANCELLED")

    async def scenario() -> None:
        before = await cancelled()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(plane.frontend, Ask(one, max_tokens=ENDLESS))) for one in PROTOCOLS]
            await until(lambda: has(worker, "dynamo_request_queue", len(PROTOCOLS) - 1))
            for task in tasks:
                task.cancel()

        async def all_are_counted() -> bool:
            return await cancelled() == before + len(PROTOCOLS)

        await until(all_are_counted)

    asyncio.run(scenario())
