"""A worker that was full once is asked again soon: at the latest 1 s after the last refusal, whatever it reports.

| workload | nemesis | checker |
| --- | --- | --- |
| N + Q + 50 requests at once on the only worker, then none | reports of load, or none | answers again within 1.1 s |
"""

import asyncio
from functools import partial

import pytest

from tests.integration.answers import Refused
from tests.integration.asks import Ask
from tests.integration.clients import answer, gathered, is_answered, outcome
from tests.integration.conftest import Start
from tests.integration.plane import until
from tests.integration.readings import wait_quiet

SLOTS, PLACES = 2, 3
BURST = SLOTS + PLACES + 50
FULL_S_MAX = 1.1
LIMITS = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}", "--mocker-itl-ms=20")


@pytest.mark.parametrize("protocols", [("grpc",), ("stream", "unary")], ids=["grpc", "http"])
@pytest.mark.parametrize("options", [(), ("--mocker-fault=mute_after=0",)], ids=["reports", "mute"])
def test_after_a_burst_the_next_request_is_soon_answered(
    start_plane: Start, options: tuple[str, ...], protocols: tuple[str, ...]
) -> None:
    plane = start_plane()
    nexts = [Ask(protocol, max_tokens=4) for protocol in protocols]
    asks = [nexts[number % len(nexts)] for number in range(BURST)]

    async def scenario() -> None:
        worker = await plane.worker(*LIMITS, *options)
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in nexts)
        outcomes = await gathered(outcome(plane.frontend, ask) for ask in asks)
        assert any(isinstance(one, Refused) for one in outcomes)
        for ask in nexts:
            await until(partial(is_answered, plane.frontend, ask), seconds_max=FULL_S_MAX)
        assert await gathered(answer(plane.frontend, ask) for ask in nexts) == undisturbed
        await wait_quiet(worker, plane.frontend)
        assert not plane.frontend.events("worker lost")

    asyncio.run(scenario())
