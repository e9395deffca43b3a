"""Streams move away from a worker whose engine fails or hangs while the worker itself still responds."""

import asyncio

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import (
    answer,
    answers_under_fault,
    background_stream,
    move_reasons,
    run_together,
)

ITL = "--mocker-itl-ms=5"


def test_streams_leave_a_worker_whose_engine_hangs_while_its_server_responds(start_plane: Start) -> None:
    """The worker keeps sending heartbeats; only its step count stands still."""
    plane = start_plane(frontend=("--engine-stall-ms=4000",))
    requests = [
        Request(PROTOCOLS[number % 3], is_chat=number % 2 == 0, temperature=0.8, seed=number, max_tokens=100)
        for number in range(6)
    ]

    async def scenario() -> None:
        dead = await plane.worker(ITL, "--mocker-fault=hang_after=50")

        async def start_another_worker() -> None:
            await plane.worker(ITL)

        answers = await answers_under_fault(plane.frontend, requests, start_another_worker)
        assert move_reasons(plane.frontend, requests) == [["STALLED"]] * len(requests)
        assert dead.status() is None
        assert answers == await run_together(answer(plane.frontend, request) for request in requests)

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_request_moves_when_the_engine_fails_before_the_first_token(start_plane: Start, protocol: str) -> None:
    plane = start_plane()

    async def scenario() -> list[Answer]:
        await plane.worker(ITL)
        undisturbed = await answer(plane.frontend, Request(protocol))
        await plane.worker(ITL, "--mocker-fault=raise_after=0")
        async with background_stream(plane.frontend):
            assert await answer(plane.frontend, Request(protocol, request_id="moved")) == undisturbed
        return [undisturbed]

    asyncio.run(scenario())
    assert [move["reason"] for move in plane.frontend.moves("moved")] == ["ENGINE_ERROR"]
    assert not plane.frontend.events_until_now("worker lost"), "an engine error must not count against the worker"
