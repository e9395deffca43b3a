"""Workers that are killed from outside, at any moment, cost their clients nothing but time.

| workload | nemesis | checker |
| --- | --- | --- |
| 100 streams of all kinds at a time on one worker | one SIGKILL | `Answer`, all moved |
| 12 streams of all kinds on the only worker | SIGKILL; another worker 3 s later | `Answer`, all moved |
| a unary request that may not move | its worker dies | what had come, if asked for |

`Answer` is text, token ids, usage and finish reason; who reads it (answers.py) checks positions, marker and [DONE].
Kills at every single position are in test_moves.py.
"""

import asyncio
from dataclasses import replace
from itertools import product

import pytest

from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.answers import Answer, Refused
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import lose, move_reasons, outcome, under_streams, without_faults
from tests.integration.harness.engines import movable

STREAMS = 100
AWAY_S = 3.0
WORKLOAD = [
    Ask(protocol, is_chat=is_chat, temperature=temperature)
    for protocol, is_chat, temperature in product(PROTOCOLS, (False, True), (0.0, 0.8))
]


@on_both_engines
def test_100_streams_lose_nothing_when_the_worker_under_all_of_them_is_killed(start_plane: Start) -> None:
    plane = start_plane()
    asks = [
        replace(ask, prompt=f"Stream {number}", seed=number, max_tokens=100)
        for number, ask in zip(range(STREAMS), movable(plane.engine, WORKLOAD) * STREAMS, strict=False)
    ]

    async def scenario() -> None:
        undisturbed = await without_faults(plane, asks)
        victim = await plane.worker("--mocker-itl-ms=40")  # Slow, so that all have begun before any ends.

        async def kill() -> None:
            victim.kill()
            await plane.worker("--mocker-itl-ms=1")

        assert await under_streams(plane.frontend, asks, kill) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["DISCONNECTED"]] * STREAMS

    asyncio.run(scenario())


@on_both_engines
def test_w7_the_only_worker_is_killed_and_another_comes_3_s_later_and_nothing_is_lost(start_plane: Start) -> None:
    plane = start_plane()
    asks = movable(plane.engine, WORKLOAD)

    async def scenario() -> None:
        undisturbed = await without_faults(plane, asks)
        victim = await plane.worker("--mocker-itl-ms=10")

        async def kill_and_replace() -> None:
            await lose(plane, victim)
            await asyncio.sleep(AWAY_S)  # The time without any worker is what is tested.
            assert not any(move_reasons(plane.frontend, asks)), "somebody was served meanwhile"
            await plane.worker("--mocker-itl-ms=1")

        assert await under_streams(plane.frontend, asks, kill_and_replace) == undisturbed
        assert move_reasons(plane.frontend, asks) == [["DISCONNECTED"]] * len(asks)

    asyncio.run(scenario())
    gaps = [move["gap_ms"] for move in plane.frontend.events("request moved")]
    assert min(gaps) > AWAY_S * 1e3


@pytest.mark.parametrize("is_asked", [True, False])
def test_what_had_come_of_a_unary_answer_is_not_thrown_away_if_the_client_asks(
    start_plane: Start, is_asked: bool
) -> None:
    plane = start_plane()
    headers = {"X-Migration-Limit": "0"} | ({"X-Return-Partial": "true"} if is_asked else {})

    async def scenario() -> tuple[Answer, Answer | Refused]:
        whole = (await without_faults(plane, [Ask("unary")]))[0]
        await plane.worker("--mocker-fault=die_after=30", "--mocker-fault=linger_ms=100")
        return whole, await outcome(plane.frontend, Ask("unary", headers=headers))

    whole, refused = asyncio.run(scenario())
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (502, "DISCONNECTED")
    if is_asked:
        (choice,) = refused.error["partial"]["choices"]
        assert choice["finish_reason"] is None
        assert len(choice["text"]) > 10
        assert whole.text.startswith(choice["text"])
    else:
        assert "partial" not in refused.error
