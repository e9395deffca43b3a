"""A thousand clients that leave at any moment leave nothing behind.

| workload | nemesis | checker |
| --- | --- | --- |
| 1,000 requests of all kinds | clients leave, seeded; two workers die | gauges 0, exact answers, no error logged |
| 200 more among them | cancelled by name, or past their deadline | the same; all are counted by their cause |
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import replace

from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.cancellations import cancel_over_grpc
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, outcome, run_together
from tests.integration.harness.metrics import read_metrics, wait_idle
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

SEED = 49
LEAVING, OTHERS = 1_000, 200
REQUESTS = LEAVING + OTHERS
CLIENTS = 50
STAY_S_MAX = 0.25
KILLS = (300, 650)
"""After how many requests a worker is killed."""
LIMITS = ("--engine-request-limit=16", "--request-queue-limit=8")
PACE = ("--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=64", "--mocker-prefill-us-per-token=50")
WHOLE = [Request(protocol, is_chat=is_chat) for protocol in PROTOCOLS for is_chat in (False, True)]


class Storm:
    """The requests that are still to come, and the workers that are still to die."""

    def __init__(self, plane: Plane, victims: list[Process]) -> None:
        self._plane = plane
        self._victims = victims
        self.begun = 0

    async def client(self) -> None:
        """One request after the other, each ended at some moment."""
        while self.begun < REQUESTS:
            self.begun += 1
            number, rng = self.begun, random.Random(SEED + self.begun)
            if number in KILLS:
                self._victims.pop().kill()
                self._plane.launch(*LIMITS, *PACE)
            await WAYS[number % len(WAYS)](self._plane.frontend, some_request(number, rng), rng.random() * STAY_S_MAX)


def some_request(number: int, rng: random.Random) -> Request:
    return Request(
        rng.choice(PROTOCOLS),
        is_chat=rng.random() < 0.5,
        prompt="p" * rng.choice((5, 50, 5_000)),
        max_tokens=ENDLESS,
        n=rng.choice((1, 1, 2)),
        request_id=f"random-{number}",
    )


async def leave(frontend: Frontend, request: Request, stay_s: float) -> None:
    with suppress(TimeoutError):  # The client has left: what is tested.
        async with asyncio.timeout(stay_s):
            await outcome(frontend, request)


async def be_cancelled(frontend: Frontend, request: Request, stay_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        client = Client(frontend, request).start(group)
        await asyncio.sleep(stay_s)  # The moment is what is tested.

        async def has_ended() -> bool:
            """It may not have come that far when it was cancelled first."""
            await cancel_over_grpc(frontend, request.request_id)
            return client.is_refused

        await until(has_ended)


async def be_late(frontend: Frontend, request: Request, stay_s: float) -> None:
    assert isinstance(await outcome(frontend, replace(request, timeout_s=stay_s + 0.001)), Refused)


WAYS = [leave] * 10 + [be_cancelled, be_late]
assert LEAVING * (len(WAYS) - 10) == OTHERS * 10


def test_a_thousand_disconnects_leave_nothing_behind(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        workers = await run_together(plane.worker(*LIMITS, *PACE) for _ in range(3))
        whole = await run_together(answer(plane.frontend, request) for request in WHOLE)
        storm = Storm(plane, workers[1:])
        await run_together(storm.client() for _ in range(CLIENTS))
        alive = [process for process in plane.processes if process.status() is None]
        workers = [one for one in alive if one not in (plane.registry, plane.frontend)]
        assert len(workers) == 3
        for worker in workers:
            await plane.found(worker)
        await wait_idle(plane.frontend, *workers)
        for request in WHOLE:
            assert [await answer(plane.frontend, request) for _ in workers] == [whole[WHOLE.index(request)]] * 3
        await check_counted(plane)

    asyncio.run(scenario())
    errors = [event for process in plane.processes for event in process.events(level="error")]
    assert not errors, errors


async def check_counted(plane: Plane) -> None:
    """Each that was ended early, once, by its cause."""
    metrics = await read_metrics(plane.frontend)
    name = "dynamo_frontend_model_cancellation_total"
    causes = {cause: metrics.sum(name, cause=cause) for cause in ("client_disconnect", "explicit", "deadline")}
    ended = [
        metrics.sum("dynamo_frontend_requests_total", error_type=one) for one in ("CANCELLED", "DEADLINE_EXCEEDED")
    ]
    assert causes["client_disconnect"] > LEAVING / 2
    assert causes["client_disconnect"] + causes["explicit"] == ended[0]
    assert causes["deadline"] == ended[1]
    assert metrics.sum(name) == sum(ended)
    assert 0 < causes["explicit"] <= OTHERS / 2
    assert 0 < causes["deadline"] <= OTHERS / 2
