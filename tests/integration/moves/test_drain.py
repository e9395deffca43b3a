"""Who leaves in order (SIGTERM, `unbroken drain`) leaves nobody behind: streams move or finish; the exit status is 0.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of all kinds on one of two workers | SIGTERM, `unbroken drain` | `Answer`, all moved for DRAINING, exit 0 |
| the same on the only worker | SIGTERM with time enough | `Answer`, nothing moves, nothing new is taken, exit 0 |
| the same | SIGTERM with too little time, then another worker | `Answer`, all moved for DRAINING, exit 0 |
| as many as two workers have slots and places for | SIGTERM of one with too little time | `Answer`, exit 0 |
| the same on two workers | all are replaced, one after the other | every `Answer`; the largest gap is printed |
| the same | SIGTERM of the frontend | `Answer`, `/health` 503, nothing new is taken, exit 0 |
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from signal import SIGTERM

import aiohttp
import grpc
import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.answers import Refused
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import answer, gathered, move_reasons, under_streams, without_faults
from tests.integration.harness.engines import movable
from tests.integration.harness.plane import Frontend, Plane, Process, until
from tests.integration.harness.visits import ENDLESS, Visit

ASKS = [
    Ask(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=150)
    for number in range(12)
]
ITL, SLOW = "--mocker-itl-ms=4", "--mocker-itl-ms=40"
PATIENT = ("--stall-ms=8000",)
"""A worker that is silent on a busy machine is not what these tests are about."""
RESTARTS = 4
"""Each of two workers, twice."""


async def wait_exit(process: Process) -> int | None:
    await until(lambda: process.status() is not None)
    return process.status()


async def by_signal(_: Plane, worker: Process) -> None:
    worker.signal(SIGTERM)


async def by_command(plane: Plane, worker: Process) -> None:
    assert await plane.run("drain", worker.ready["instance_id"]) == 0


@on_both_engines
@pytest.mark.parametrize("leave", [by_signal, by_command])
def test_the_streams_of_a_worker_that_leaves_move_at_once_where_there_is_another(
    start_plane: Start, leave: Callable[[Plane, Process], Awaitable[None]]
) -> None:
    plane = start_plane(frontend=PATIENT)
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        undisturbed = await without_faults(plane, asks)
        leaving = await plane.worker(SLOW)

        async def leave_to_another() -> None:
            await plane.worker(ITL)
            await leave(plane, leaving)

        assert await under_streams(plane.frontend, asks, leave_to_another) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["DRAINING"]] * len(asks)
        assert await wait_exit(leaving) == 0
        assert await answer(plane.frontend, asks[0]) == undisturbed[0]

    asyncio.run(scenario())
    assert not plane.frontend.events(level="error")


@on_both_engines
def test_the_streams_of_the_only_worker_wait_for_another_if_its_time_is_too_short(start_plane: Start) -> None:
    plane = start_plane(frontend=PATIENT)
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        leaving = await plane.worker(ITL, "--drain-timeout=0.1")
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)

        async def leave_and_come() -> None:
            leaving.signal(SIGTERM)
            assert await wait_exit(leaving) == 0
            await plane.worker(ITL)

        assert await under_streams(plane.frontend, asks, leave_and_come) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["DRAINING"]] * len(asks)

    asyncio.run(scenario())


@on_both_engines
def test_what_waits_for_a_slot_of_a_worker_that_leaves_waits_for_one_of_another(start_plane: Start) -> None:
    """Both are full, so that nobody can go elsewhere before some have finished."""
    plane = start_plane(frontend=PATIENT)
    asks = [replace(ask, max_tokens=60) for ask in movable(plane.engine, ASKS)[:10]]

    async def scenario() -> None:
        narrow = ("--mocker-itl-ms=10", "--engine-request-limit=2", "--request-queue-limit=3", "--drain-timeout=0.1")
        leaving, _ = await plane.worker(*narrow), await plane.worker(*narrow)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer(plane.frontend, ask)) for ask in asks]
            await until(lambda: is_waiting(leaving, 3))
            leaving.signal(SIGTERM)

        assert [task.result() for task in tasks] == undisturbed
        assert await wait_exit(leaving) == 0
        assert leaving.events("handing over")

    asyncio.run(scenario())


async def is_waiting(worker: Process, count: int) -> bool:
    return await worker.metric("dynamo_request_queue") == count


@on_both_engines
def test_a_worker_that_leaves_takes_no_new_request_while_its_streams_finish(start_plane: Start) -> None:
    plane = start_plane(frontend=PATIENT)
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        leaving = await plane.worker(ITL)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)

        async def leave_and_ask() -> None:
            leaving.signal(SIGTERM)
            await until(lambda: leaving.events("draining"))
            with pytest.raises(Refused) as caught:
                await answer(plane.frontend, replace(asks[0], protocol="unary"))
            assert (caught.value.code, caught.value.reason) == (503, "NO_WORKERS")

        assert await under_streams(plane.frontend, asks, leave_and_ask) == undisturbed
        assert await wait_exit(leaving) == 0

    asyncio.run(scenario())


@on_both_engines
def test_a_rolling_restart_of_all_workers_under_load_loses_nothing(start_plane: Start) -> None:
    plane = start_plane(frontend=PATIENT)
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        workers = [await plane.worker(ITL) for _ in range(2)]
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)
        is_over = asyncio.Event()

        async def ask_on(number: int) -> int:
            answered = 0
            while not is_over.is_set():
                assert await answer(plane.frontend, asks[number]) == undisturbed[number]
                answered += 1
            return answered

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(ask_on(number)) for number in range(len(asks))]
            for _ in range(RESTARTS):
                workers.append(await plane.worker(ITL))
                leaving = workers.pop(0)
                leaving.signal(SIGTERM)
                assert await wait_exit(leaving) == 0
            is_over.set()
        assert all(client.result() for client in clients)

    asyncio.run(scenario())
    moves = plane.frontend.events("request moved")
    assert {move["reason"] for move in moves} == {"DRAINING"}
    print(f"{len(moves)} moves, largest gap {max(move['gap_ms'] for move in moves)} ms")


def test_a_frontend_that_leaves_finishes_its_streams_and_takes_nothing_new(start_plane: Start) -> None:
    plane = start_plane(frontend=PATIENT)
    asks = movable(plane.engine, ASKS)

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in asks)

        async def leave() -> None:
            async with asyncio.TaskGroup() as group:
                last = Visit(plane.frontend, Ask("grpc", max_tokens=ENDLESS)).start(group)
                await until(lambda: last.has_begun)
                plane.frontend.signal(SIGTERM)
                await check_takes_nothing_new()
                last.leave()

        async def check_takes_nothing_new() -> None:
            await until(lambda: plane.frontend.events("draining"))
            assert await health(plane.frontend) == 503
            for protocol, code in (("unary", 503), ("stream", 503), ("grpc", grpc.StatusCode.UNAVAILABLE.name)):
                with pytest.raises(Refused) as caught:
                    await answer(plane.frontend, Ask(protocol))
                assert (caught.value.code, caught.value.reason) == (code, "DRAINING")

        assert await under_streams(plane.frontend, asks, leave) == undisturbed
        assert await wait_exit(plane.frontend) == 0

    asyncio.run(scenario())


def test_a_frontend_that_can_wait_no_longer_tells_every_client_why(start_plane: Start) -> None:
    """Once the streams were broken off without a word, and counted as if their clients had left."""
    plane = start_plane(frontend=(*PATIENT, "--drain-timeout=0.2"))
    asks = [replace(ask, max_tokens=3000) for ask in movable(plane.engine, ASKS)]
    codes = {"grpc": "UNAVAILABLE", "unary": 503, "stream": 200}

    async def told(number: int, begun: set[int]) -> tuple[int | str, str]:
        with pytest.raises(Refused) as caught:
            await answer(plane.frontend, asks[number].named(f"s{number}"), lambda _: begun.add(number))
        return caught.value.code, caught.value.reason

    async def scenario() -> None:
        await plane.worker(ITL)
        begun: set[int] = set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(told(number, begun)) for number in range(len(asks))]
            await until(lambda: len(begun) == sum(ask.protocol != "unary" for ask in asks))
            plane.frontend.signal(SIGTERM)

        assert [task.result() for task in tasks] == [(codes[ask.protocol], "DRAINING") for ask in asks]
        assert await wait_exit(plane.frontend) == 0
        outcomes = [event["outcome"] for event in plane.frontend.events("request")]
        assert outcomes == ["DRAINING"] * len(asks)

    asyncio.run(scenario())


async def health(frontend: Frontend) -> int:
    async with aiohttp.ClientSession() as session, session.get(f"{frontend.http}/health") as response:
        return response.status
