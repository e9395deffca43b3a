"""Who leaves in order (SIGTERM) leaves nobody behind: streams finish or go on elsewhere, and the exit status is 0.

| workload | nemesis | checker |
| --- | --- | --- |
| streams of all kinds on one worker | SIGTERM with time enough | `Answer`, nothing moves, exit 0 |
| the same | SIGTERM with too little time | `Answer`, all moved for DRAINING, exit 0 |
| the same | SIGTERM of the frontend | `Answer`, `/health` 503, nothing new is taken, exit 0 |
| the same, longer than the drain | SIGTERM of the frontend | each client is told DRAINING, and counted so; exit 0 |
"""

import asyncio
from dataclasses import replace
from signal import SIGTERM

import aiohttp
import grpc
import pytest

from tests.integration.clients import PROTOCOLS, Ask, Refused, answer, gathered, move_reasons, under_streams
from tests.integration.conftest import Start
from tests.integration.plane import Frontend, Process, until

ASKS = [
    Ask(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=150)
    for number in range(12)
]
ITL = "--mocker-itl-ms=4"


async def wait_exit(process: Process) -> int | None:
    await until(lambda: process.status() is not None)
    return process.status()


@pytest.mark.parametrize(
    ("drain_s", "moves"), [(20, []), (0.1, ["DRAINING"])], ids=["with time enough", "with too little time"]
)
def test_a_worker_that_leaves_is_not_noticed(start_plane: Start, drain_s: float, moves: list[str]) -> None:
    plane = start_plane()

    async def scenario() -> None:
        leaving = await plane.worker(ITL, f"--drain-timeout={drain_s}")
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in ASKS)

        async def leave() -> None:
            await plane.worker(ITL)
            leaving.signal(SIGTERM)

        assert await under_streams(plane.frontend, ASKS, leave) == undisturbed
        assert move_reasons(plane.frontend, ASKS) == [moves] * len(ASKS)
        assert await wait_exit(leaving) == 0
        assert await answer(plane.frontend, ASKS[0]) == undisturbed[0]

    asyncio.run(scenario())


def test_a_worker_that_leaves_takes_no_new_request_while_its_streams_finish(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        leaving = await plane.worker(ITL)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in ASKS)

        async def leave_and_ask() -> None:
            leaving.signal(SIGTERM)
            await until(lambda: leaving.events("draining"))
            with pytest.raises(Refused) as caught:
                await answer(plane.frontend, replace(ASKS[0], protocol="unary"))
            assert (caught.value.code, caught.value.reason) == (503, "NO_WORKERS")

        assert await under_streams(plane.frontend, ASKS, leave_and_ask) == undisturbed
        assert await wait_exit(leaving) == 0

    asyncio.run(scenario())


def test_a_frontend_that_leaves_finishes_its_streams_and_takes_nothing_new(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in ASKS)

        async def leave() -> None:
            plane.frontend.signal(SIGTERM)
            await until(lambda: plane.frontend.events("draining"))
            assert await health(plane.frontend) == 503
            for protocol, code in (("unary", 503), ("stream", 503), ("grpc", grpc.StatusCode.UNAVAILABLE.name)):
                with pytest.raises(Refused) as caught:
                    await answer(plane.frontend, Ask(protocol))
                assert (caught.value.code, caught.value.reason) == (code, "DRAINING")

        assert await under_streams(plane.frontend, ASKS, leave) == undisturbed
        assert await wait_exit(plane.frontend) == 0

    asyncio.run(scenario())


def test_a_frontend_that_can_wait_no_longer_tells_every_client_why(start_plane: Start) -> None:
    """Once the streams were broken off without a word, and counted as if their clients had left."""
    plane = start_plane(frontend=("--drain-timeout=0.2",))
    asks = [replace(ask, max_tokens=3000) for ask in ASKS]
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
