"""Workers that are killed at any moment cost their clients nothing but time.

| workload | nemesis | checker |
| --- | --- | --- |
| 100 concurrent streams of all kinds on one worker | one SIGKILL | `Answer`, all moved |
| 12 streams of all kinds on the only worker | SIGKILL; another worker 3 s later | `Answer`, all moved |
| a unary request that may not move | its worker dies | the partial answer, if requested |
| requests that may not move, one of two workers dies | the same | no move is counted |
| 8 streams on two workers with different limits of moves | SIGKILL to one | its own limit decides |

`Answer` is text, token ids, usage and finish reason. Its parser (answers.py) checks positions, marker and [DONE]. Kills
at every single position are in test_every_position.py.
"""

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import (
    answers_under_fault,
    kill_and_wait_lost,
    move_reasons,
    outcome,
    run_together,
    undisturbed_answers,
)
from tests.integration.harness.metrics import wait_load
from tests.integration.harness.plane.engines import movable_requests
from tests.integration.harness.waiting import until

STREAMS = 100
AWAY_S = 3.0
SLOW = "--mocker-itl-ms=200"
"""All streams begin before any ends."""
WORKLOAD = [
    Request(protocol, is_chat=is_chat, temperature=temperature)
    for protocol, is_chat, temperature in product(PROTOCOLS, (False, True), (0.0, 0.8))
]


@on_both_engines
def test_100_streams_lose_nothing_when_their_worker_is_killed(start_plane: Start) -> None:
    plane = start_plane()
    requests = [
        replace(request, prompt=f"Stream {number}", seed=number, max_tokens=100)
        for number, request in zip(range(STREAMS), movable_requests(plane.engine, WORKLOAD) * STREAMS, strict=False)
    ]

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        victim = await plane.worker(SLOW)

        async def kill() -> None:
            victim.kill()
            await plane.worker("--mocker-itl-ms=1")

        assert await answers_under_fault(plane.frontend, requests, kill, victim) == undisturbed
        assert move_reasons(plane.frontend, requests) == [["DISCONNECTED"]] * STREAMS

    asyncio.run(scenario())


@on_both_engines
def test_streams_of_a_killed_only_worker_continue_on_one_that_starts_3_s_later(start_plane: Start) -> None:
    plane = start_plane()
    requests = movable_requests(plane.engine, WORKLOAD)

    async def scenario() -> None:
        undisturbed = await undisturbed_answers(plane, requests)
        victim = await plane.worker(SLOW)

        async def kill_and_replace() -> None:
            await kill_and_wait_lost(plane, victim)
            await asyncio.sleep(AWAY_S)  # Not synchronisation: the time without any worker is what is tested.
            assert not any(move_reasons(plane.frontend, requests)), "a stream moved while there was no worker"
            await plane.worker("--mocker-itl-ms=1")

        assert await answers_under_fault(plane.frontend, requests, kill_and_replace, victim) == undisturbed
        assert move_reasons(plane.frontend, requests) == [["DISCONNECTED"]] * len(requests)

    asyncio.run(scenario())
    gaps = [move["gap_ms"] for move in plane.frontend.events_until_now("request moved")]
    assert min(gaps) > AWAY_S * 1e3


@pytest.mark.parametrize("is_requested", [True, False])
def test_unary_client_gets_the_partial_answer_only_if_it_asks_for_it(start_plane: Start, is_requested: bool) -> None:
    plane = start_plane()
    headers = {"X-Migration-Limit": "0"} | ({"X-Return-Partial": "true"} if is_requested else {})

    async def scenario() -> tuple[Answer, Answer | Refused]:
        whole = (await undisturbed_answers(plane, [Request("unary")]))[0]
        await plane.worker("--mocker-fault=die_after=30", "--mocker-fault=linger_ms=500")
        return whole, await outcome(plane.frontend, Request("unary", headers=headers))

    whole, refused = asyncio.run(scenario())
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (502, "DISCONNECTED")
    if is_requested:
        (choice,) = refused.error["partial"]["choices"]
        assert choice["finish_reason"] is None
        assert len(choice["text"]) > 10
        assert whole.text.startswith(choice["text"])
    else:
        assert "partial" not in refused.error


@pytest.mark.parametrize(("option", "limit"), [("--migration-limit=0", None), ("--migration-limit=3", "0")])
def test_request_that_may_not_move_is_not_counted_as_moved(start_plane: Start, option: str, limit: str | None) -> None:
    plane = start_plane(frontend=(option,))
    headers = {} if limit is None else {"X-Migration-Limit": limit}

    async def scenario() -> None:
        victim = await plane.worker("--mocker-itl-ms=5", "--mocker-fault=die_after=5")
        await plane.worker("--mocker-itl-ms=5")
        outcomes = await run_together(outcome(plane.frontend, Request("unary", headers=headers)) for _ in range(8))

        assert {one.reason for one in outcomes if isinstance(one, Refused)} == {"DISCONNECTED"}
        await until(lambda: victim.status() == -9)
        assert await plane.frontend.metric("dynamo_frontend_model_migration_total") == 0
        assert not plane.frontend.events_until_now("request moved")

    asyncio.run(scenario())


@pytest.mark.parametrize(("lost_limit", "other_limit"), [(0, 2), (2, 0)])
def test_workers_with_different_limits_serve_together_and_the_limit_of_the_lost_one_counts(
    start_plane: Start, lost_limit: int, other_limit: int
) -> None:
    plane = start_plane()
    requests = [Request("grpc", max_tokens=50) for _ in range(8)]

    async def scenario() -> None:
        lost = await plane.worker(SLOW, f"--migration-limit={lost_limit}")
        other = await plane.worker(SLOW, f"--migration-limit={other_limit}")
        assert await plane.frontend.metric("dynamo_frontend_model_migration_limit", model="mocker") == 2

        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(outcome(plane.frontend, request.named(f"s{number}")))
                for number, request in enumerate(requests)
            ]
            await wait_load(lost, len(requests) // 2, 0)
            await wait_load(other, len(requests) // 2, 0)
            lost.kill()

        ended = [task.result() for task in tasks]
        refused = [one.reason for one in ended if isinstance(one, Refused)]
        moves = [move for moves in move_reasons(plane.frontend, requests) for move in moves]
        assert refused == ([] if lost_limit else ["DISCONNECTED"] * 4)
        assert moves == (["DISCONNECTED"] * 4 if lost_limit else [])

    asyncio.run(scenario())
