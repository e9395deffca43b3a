"""A thousand clients that leave at any moment leave nothing behind.

| workload | nemesis | checker |
| --- | --- | --- |
| 1,000 requests of all kinds | clients leave, seeded; two workers die | gauges 0, exact answers, no error logged |
"""

import asyncio
import random
from contextlib import suppress

from tests.integration.asks import PROTOCOLS, Ask
from tests.integration.clients import answer, gathered, outcome
from tests.integration.conftest import Start
from tests.integration.plane import Plane, Process, until
from tests.integration.readings import read, wait_quiet
from tests.integration.visits import ENDLESS

SEED = 49
REQUESTS = 1_000
CLIENTS = 50
STAY_S_MAX = 0.25
KILLS = (300, 650)
"""After how many requests a worker is killed."""
LIMITS = ("--engine-request-limit=16", "--request-queue-limit=8")
PACE = ("--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=64", "--mocker-prefill-us-per-token=50")
WHOLE = [Ask(protocol, is_chat=is_chat) for protocol in PROTOCOLS for is_chat in (False, True)]


class Storm:
    """The requests that are still to come, and the workers that are still to die."""

    def __init__(self, plane: Plane, victims: list[Process]) -> None:
        self._plane = plane
        self._victims = victims
        self._rng = random.Random(SEED)
        self.begun = 0

    async def client(self) -> None:
        """One request after the other, each left at some moment."""
        while self.begun < REQUESTS:
            self.begun += 1
            if self.begun in KILLS:
                self._victims.pop().kill()
                self._plane.launch(*LIMITS, *PACE)
            await self._ask(self._rng)

    async def _ask(self, rng: random.Random) -> None:
        ask = Ask(
            rng.choice(PROTOCOLS),
            is_chat=rng.random() < 0.5,
            prompt="p" * rng.choice((5, 50, 5_000)),
            max_tokens=ENDLESS,
            n=rng.choice((1, 1, 2)),
        )
        with suppress(TimeoutError):  # The client has left: what is tested.
            async with asyncio.timeout(rng.random() * STAY_S_MAX):
                await outcome(self._plane.frontend, ask)


def test_a_thousand_clients_that_leave_leave_nothing_behind(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        workers = await gathered(plane.worker(*LIMITS, *PACE) for _ in range(3))
        whole = await gathered(answer(plane.frontend, ask) for ask in WHOLE)
        storm = Storm(plane, workers[1:])
        await gathered(storm.client() for _ in range(CLIENTS))
        alive = [process for process in plane.processes if process.status() is None]
        workers = [one for one in alive if one not in (plane.registry, plane.frontend)]
        assert len(workers) == 3
        for worker in workers:
            await plane.found(worker)
        await wait_quiet(plane.frontend, *workers)
        for ask in WHOLE:
            assert [await answer(plane.frontend, ask) for _ in workers] == [whole[WHOLE.index(ask)]] * 3
        await check_ended_by_clients(plane)

    asyncio.run(scenario())
    errors = [event for process in plane.processes for event in process.events(level="error")]
    assert not errors, errors


async def check_ended_by_clients(plane: Plane) -> None:
    """Each that was not refused was cancelled, for that cause."""
    reading = await read(plane.frontend)
    name = "dynamo_frontend_model_cancellation_total"
    cancelled = reading.sum("dynamo_frontend_requests_total", error_type="CANCELLED")
    assert cancelled > REQUESTS / 2
    assert reading.sum(name, cause="client_disconnect") == reading.sum(name) == cancelled
    await until(lambda: not plane.frontend.events("bug"))
