"""A process that is asked to leave (SIGTERM, `unbroken drain`) loses no stream: streams move or finish; it exits with
0.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of all kinds on one of two workers | SIGTERM, `unbroken drain` | `Answer`, all moved for DRAINING, exit 0 |
| the same on the only worker | SIGTERM with enough time | `Answer`, nothing moves, no new request admitted, exit 0 |
| the same | SIGTERM with too little time, then another worker | `Answer`, all moved for DRAINING, exit 0 |
| as many as two workers have slots and places for | SIGTERM of one with too little time | `Answer`, exit 0 |
| the same on two workers | all are replaced, one after another | every `Answer`; the largest gap is printed |
| the same | SIGTERM of the frontend | `Answer`, `/health` 503, no new request admitted, exit 0 |
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from signal import SIGTERM

import aiohttp
import grpc
import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import (
    answer,
    answers_under_fault,
    move_reasons,
    run_together,
    undisturbed_answers,
)
from tests.integration.harness.plane.engines import movable_requests
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

ASKS = [
    Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=150)
    for number in range(12)
]
ITL, SLOW = "--mocker-itl-ms=4", "--mocker-itl-ms=200"
"""A slow worker's streams last for 30 s, so they are still running when another worker has been started."""
RESTARTS = 4
"""Each of the two workers is replaced twice."""


async def wait_exit(process: Process) -> int | None:
    await until(lambda: process.status() is not None)
    return process.status()


async def by_signal(_: Plane, worker: Process) -> None:
    worker.signal(SIGTERM)


async def by_command(plane: Plane, worker: Process) -> None:
    assert await plane.run("drain", worker.ready["instance_id"]) == 0


@on_both_engines
@pytest.mark.parametrize("drain", [by_signal, by_command])
def test_streams_of_a_draining_worker_move_to_another_at_once(
    start_plane: Start, drain: Callable[[Plane, Process], Awaitable[None]]
) -> None:
    plane = start_plane()
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        leaving = await plane.worker(SLOW)

        async def drain_with_another_worker() -> None:
            await plane.worker(ITL)
            await drain(plane, leaving)

        assert await answers_under_fault(plane.frontend, requests, drain_with_another_worker, leaving) == undisturbed
        assert move_reasons(plane.frontend, requests) == [["DRAINING"]] * len(requests)
        assert await wait_exit(leaving) == 0
        assert await answer(plane.frontend, requests[0]) == undisturbed[0]

    asyncio.run(scenario())
    assert not plane.frontend.events_until_now(level="error")


@on_both_engines
def test_streams_of_the_only_worker_wait_for_a_replacement_after_a_short_drain(start_plane: Start) -> None:
    plane = start_plane()
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        leaving = await plane.worker(SLOW, "--drain-timeout=0.1")

        async def drain_then_replace() -> None:
            leaving.signal(SIGTERM)
            assert await wait_exit(leaving) == 0
            await plane.worker(ITL)

        assert await answers_under_fault(plane.frontend, requests, drain_then_replace, leaving) == undisturbed
        assert move_reasons(plane.frontend, requests) == [["DRAINING"]] * len(requests)

    asyncio.run(scenario())


@on_both_engines
def test_queued_requests_of_a_draining_worker_queue_at_another(start_plane: Start) -> None:
    """Both workers are full, so no request can move before others have finished."""
    plane = start_plane()
    requests = [replace(request, max_tokens=60) for request in movable_requests(plane.engine, ASKS)[:10]]

    async def scenario() -> None:
        narrow = ("--mocker-itl-ms=30", "--engine-request-limit=2", "--request-queue-limit=3", "--drain-timeout=0.1")
        undisturbed = await undisturbed_answers(plane, requests)
        leaving, _ = await plane.worker(*narrow), await plane.worker(*narrow)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(plane.frontend, request)) for request in requests]
            await until(lambda: is_waiting(leaving, 3))
            leaving.signal(SIGTERM)

        assert [task.result() for task in tasks] == undisturbed
        assert await wait_exit(leaving) == 0
        assert leaving.events_until_now("handing over")

    asyncio.run(scenario())


async def is_waiting(worker: Process, count: int) -> bool:
    return await worker.metric("dynamo_request_queue") == count


@on_both_engines
def test_draining_worker_takes_no_new_request_while_its_streams_finish(start_plane: Start) -> None:
    plane = start_plane(frontend=("--replacement-wait=0.2",))
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        leaving = await plane.worker(ITL)
        undisturbed = await run_together(answer(plane.frontend, request) for request in requests)

        async def drain_and_send() -> None:
            leaving.signal(SIGTERM)
            await until(lambda: leaving.events("draining"))
            with pytest.raises(Refused) as caught:
                await answer(plane.frontend, replace(requests[0], protocol="unary"))
            assert (caught.value.code, caught.value.reason) == (503, "NO_WORKERS")

        assert await answers_under_fault(plane.frontend, requests, drain_and_send) == undisturbed
        assert await wait_exit(leaving) == 0

    asyncio.run(scenario())


@on_both_engines
@pytest.mark.parametrize("tokens", [150, 4], ids=["long answers", "short answers"])
def test_rolling_restart_under_load_loses_nothing(start_plane: Start, tokens: int) -> None:
    """With short answers, many requests cross the announcement of a worker that leaves."""
    plane = start_plane()
    requests = [replace(request, max_tokens=tokens) for request in movable_requests(plane.engine, ASKS)]

    async def scenario() -> None:
        workers = [await plane.worker(ITL) for _ in range(2)]
        undisturbed = await run_together(answer(plane.frontend, request) for request in requests)
        is_over = asyncio.Event()

        async def send_again_and_again(number: int) -> int:
            answered = 0
            while not is_over.is_set():
                assert await answer(plane.frontend, requests[number]) == undisturbed[number]
                answered += 1
            return answered

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(send_again_and_again(number)) for number in range(len(requests))]
            for _ in range(RESTARTS):
                workers.append(await plane.worker(ITL))
                leaving = workers.pop(0)
                leaving.signal(SIGTERM)
                assert await wait_exit(leaving) == 0
            is_over.set()
        assert all(client.result() for client in clients)

    asyncio.run(scenario())
    moves = plane.frontend.events_until_now("request moved")
    assert {move["reason"] for move in moves} <= {"DRAINING"}
    assert moves or tokens == 4, "no stream moved"
    print(f"{len(moves)} moves, largest gap {max((move['gap_ms'] for move in moves), default=0)} ms")


def test_draining_frontend_finishes_its_streams_and_takes_nothing_new(start_plane: Start) -> None:
    plane = start_plane()
    requests = movable_requests(plane.engine, ASKS)

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await run_together(answer(plane.frontend, request) for request in requests)

        async def drain() -> None:
            async with asyncio.TaskGroup() as group:
                last = Client(plane.frontend, Request("grpc", max_tokens=ENDLESS)).start(group)
                await until(lambda: last.has_begun)
                plane.frontend.signal(SIGTERM)
                await check_nothing_new_is_taken()
                last.hang_up()

        async def check_nothing_new_is_taken() -> None:
            await until(lambda: plane.frontend.events("draining"))
            assert await health(plane.frontend) == 503
            for protocol, code in (("unary", 503), ("stream", 503), ("grpc", grpc.StatusCode.UNAVAILABLE.name)):
                with pytest.raises(Refused) as caught:
                    await answer(plane.frontend, Request(protocol))
                assert (caught.value.code, caught.value.reason) == (code, "DRAINING")

        assert await answers_under_fault(plane.frontend, requests, drain) == undisturbed
        assert await wait_exit(plane.frontend) == 0

    asyncio.run(scenario())


def test_frontend_whose_drain_times_out_tells_every_client_why(start_plane: Start) -> None:
    """Regression: streams once ended without an error, and were counted as if their clients had left."""
    plane = start_plane(frontend=("--drain-timeout=0.2",))
    requests = [replace(request, max_tokens=3000) for request in movable_requests(plane.engine, ASKS)]
    codes = {"grpc": "UNAVAILABLE", "unary": 503, "stream": 200}

    async def refusal_of(number: int, begun: set[int]) -> tuple[int | str, str]:
        with pytest.raises(Refused) as caught:
            await answer(plane.frontend, requests[number].named(f"s{number}"), lambda _: begun.add(number))
        return caught.value.code, caught.value.reason

    async def scenario() -> None:
        await plane.worker(ITL)
        begun: set[int] = set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(refusal_of(number, begun)) for number in range(len(requests))]
            await until(lambda: len(begun) == sum(request.protocol != "unary" for request in requests))
            plane.frontend.signal(SIGTERM)

        assert [task.result() for task in tasks] == [(codes[request.protocol], "DRAINING") for request in requests]
        assert await wait_exit(plane.frontend) == 0
        outcomes = [event["outcome"] for event in plane.frontend.events_until_now("request")]
        assert outcomes == ["DRAINING"] * len(requests)

    asyncio.run(scenario())


async def health(frontend: Frontend) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{frontend.http}/health") as response:
        return response.status
