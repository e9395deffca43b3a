"""A thousand clients that disconnect at random moments leave nothing behind.

| workload | nemesis | checker |
| --- | --- | --- |
| 1,000 requests of all kinds | clients disconnect, seeded; two workers die | gauges 0, exact answers, no error logged |
| 200 more among them | cancelled by request id, or past their deadline | the same; each is counted with its cause |
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
DISCONNECTS, OTHERS = 1_000, 200
REQUESTS = DISCONNECTS + OTHERS
CLIENTS = 50
AFTER_S_MAX = 0.25
KILLS = (300, 650)
"""A worker is killed after this many requests."""
LIMITS = ("--engine-request-limit=16", "--request-queue-limit=8")
PACE = ("--mocker-itl-ms=5", "--mocker-prefill-chunk-tokens=64", "--mocker-prefill-us-per-token=50")
REQUESTS_TO_COMPARE = [Request(protocol, is_chat=is_chat) for protocol in PROTOCOLS for is_chat in (False, True)]


class Load:
    """The requests still to send, and the workers still to kill."""

    def __init__(self, plane: Plane, victims: list[Process]) -> None:
        self._plane = plane
        self._victims = victims
        self.begun = 0

    async def client(self) -> None:
        """Send one request after another, and end each at a random moment."""
        while self.begun < REQUESTS:
            self.begun += 1
            number, rng = self.begun, random.Random(SEED + self.begun)
            if number in KILLS:
                self._victims.pop().kill()
                self._plane.launch(*LIMITS, *PACE)
            request, after_s = random_request(number, rng), rng.random() * AFTER_S_MAX
            await ENDINGS[number % len(ENDINGS)](self._plane.frontend, request, after_s)


def random_request(number: int, rng: random.Random) -> Request:
    return Request(
        rng.choice(PROTOCOLS),
        is_chat=rng.random() < 0.5,
        prompt="p" * rng.choice((5, 50, 5_000)),
        max_tokens=ENDLESS,
        n=rng.choice((1, 1, 2)),
        request_id=f"random-{number}",
    )


async def disconnect(frontend: Frontend, request: Request, after_s: float) -> None:
    with suppress(TimeoutError):  # The disconnect that is tested.
        async with asyncio.timeout(after_s):
            await outcome(frontend, request)


async def cancel_by_id(frontend: Frontend, request: Request, after_s: float) -> None:
    async with asyncio.TaskGroup() as group:
        client = Client(frontend, request).start(group)
        await asyncio.sleep(after_s)  # Not synchronisation: the random moment is what is tested.

        async def has_ended() -> bool:
            """Repeats the cancel, because the first one may come before the request has arrived."""
            await cancel_over_grpc(frontend, request.request_id)
            return client.is_refused

        await until(has_ended)


async def exceed_deadline(frontend: Frontend, request: Request, after_s: float) -> None:
    assert isinstance(await outcome(frontend, replace(request, timeout_s=after_s + 0.001)), Refused)


ENDINGS = [disconnect] * 10 + [cancel_by_id, exceed_deadline]
assert DISCONNECTS * (len(ENDINGS) - 10) == OTHERS * 10


def test_a_thousand_disconnects_leave_nothing_behind(start_plane: Start) -> None:
    plane = start_plane()

    async def scenario() -> None:
        workers = await run_together(plane.worker(*LIMITS, *PACE) for _ in range(3))
        undisturbed = await run_together(answer(plane.frontend, request) for request in REQUESTS_TO_COMPARE)
        load = Load(plane, workers[1:])
        await run_together(load.client() for _ in range(CLIENTS))
        alive = [process for process in plane.processes if process.status() is None]
        workers = [one for one in alive if one not in (plane.registry, plane.frontend)]
        assert len(workers) == 3
        for worker in workers:
            await plane.found(worker)
        await wait_idle(plane.frontend, *workers)
        for request, expected in zip(REQUESTS_TO_COMPARE, undisturbed, strict=True):
            assert [await answer(plane.frontend, request) for _ in workers] == [expected] * 3
        await check_counted(plane)

    asyncio.run(scenario())
    errors = [event for process in plane.processes for event in process.events_until_now(level="error")]
    assert not errors, errors


async def check_counted(plane: Plane) -> None:
    """Check that each request that ended early was counted once, with its cause."""
    metrics = await read_metrics(plane.frontend)
    name = "dynamo_frontend_model_cancellation_total"
    causes = {cause: metrics.sum(name, cause=cause) for cause in ("client_disconnect", "explicit", "deadline")}
    ended = [
        metrics.sum("dynamo_frontend_requests_total", error_type=one) for one in ("CANCELLED", "DEADLINE_EXCEEDED")
    ]
    assert causes["client_disconnect"] > DISCONNECTS / 10  # Others hang up before a busy frontend has their request.
    assert causes["client_disconnect"] + causes["explicit"] == ended[0]
    assert causes["deadline"] == ended[1]
    assert metrics.sum(name) == sum(ended)
    assert 0 < causes["explicit"] <= OTHERS / 2
    assert 0 < causes["deadline"] <= OTHERS / 2
