"""Two tenants, one with ten times the load of the other, share real workers by their weights."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from services.access.key import NewKey
from services.access.keys_edit import add_key
from tests.integration.access.support import bearer
from tests.integration.conftest import Start
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until
from tests.support.doubles import run_async

SLOTS, PLACES = 2, 150
PROMPT, ANSWER = "Hello", 20
PROMPT_TOKENS = len(PROMPT)
LIGHT, TIMES = 10, 10
"""Requests that a tenant keeps under way for each worker, and how many times as many the other one does."""
BOUND = 2 * max(PROMPT_TOKENS, 2 * SLOTS * (PROMPT_TOKENS + ANSWER))
"""The greatest difference of two tenants' service that VTC allows while both wait (arXiv 2401.00588, theorem 4.4), for
a weight of 1 or more: a token of a prompt counts 1, one of an answer 2."""
WAITING_MIN = 3
"""So many wait that none of them is the last before the next look."""
SERVICE = 8 * BOUND
"""The service of a worker that is looked at. First come, first served, the difference would be most of it."""
COMPLETION = {"model": "mocker", "prompt": PROMPT, "max_tokens": ANSWER, "ignore_eos": True}


class Shared:
    """A plane with two tenants. `keys`: by the tenant."""

    def __init__(self, start_plane: Start, folder: Path, *, weight: float, workers: int, frontends: int) -> None:
        """`weight`: of the light tenant. The heavy one has 1."""
        file = folder / "keys.toml"
        file.write_text(f"[tenants.light]\nweight = {weight}\n[tenants.heavy]\n")
        self.keys = {name: add_key(file, name) for name in ("light", "heavy")}
        option = f"--keys-file={file}"
        self.plane: Plane = start_plane(frontend=(option,))
        others = [self.plane.start_frontend(option) for _ in range(frontends - 1)]
        self.frontends: Sequence[Frontend] = [self.plane.frontend, *others]
        self.workers: list[Process] = []
        run_async(self._start(workers))

    async def _start(self, workers: int) -> None:
        limits = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}", "--mocker-itl-ms=5")
        for _ in range(workers):
            worker = await self.plane.worker(*limits)
            self.workers.append(worker)

            def is_found(worker: Process = worker) -> bool:
                return all(frontend.has_found(worker) for frontend in self.frontends)

            await until(is_found)

    @asynccontextmanager
    async def load(self, tenant: str, count: int) -> AsyncIterator[None]:
        """Keep so many requests of a tenant under way."""
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, headers=bearer(self.keys[tenant])) as session,
            asyncio.TaskGroup() as group,
        ):

            async def send(number: int) -> None:
                while True:
                    frontend = self.frontends[number % len(self.frontends)]
                    async with session.post(f"{frontend.http}/v1/completions", json=COMPLETION) as response:
                        await response.read()
                        assert response.status == 200

            tasks = [group.create_task(send(number)) for number in range(count)]
            yield
            for task in tasks:
                task.cancel()


@dataclass(frozen=True)
class Look:
    """What a worker reports at one moment. `difference`: of the service that tenants had, by their weights."""

    both_wait: bool
    service: float
    difference: float


async def look(worker: Process, weight: float) -> Look:
    metrics = await read_metrics(worker)

    def service(tenant: str) -> float:
        name = "unbroken_tenant_service_tokens_total"
        return metrics.sum(name, tenant=tenant, kind="input") + 2 * metrics.sum(name, tenant=tenant, kind="output")

    waiting = [metrics.sum("unbroken_tenant_waiting", tenant=tenant) for tenant in ("light", "heavy")]
    light, heavy = service("light"), service("heavy")
    return Look(min(waiting) >= WAITING_MIN, light + heavy, heavy - light / weight)


async def longest_wait(worker: Process, weight: float) -> list[Look]:
    """Looks at a worker while both tenants wait, until it has served enough."""
    looks: list[Look] = []
    while not looks or looks[-1].service - looks[0].service < SERVICE:
        one = await look(worker, weight)
        looks = [*looks, one] if one.both_wait else []
    return looks


@pytest.mark.parametrize(("weight", "workers", "frontends"), [(1.0, 1, 1), (3.0, 1, 2), (1.0, 2, 2), (3.0, 2, 1)])
def test_difference_of_service_stays_within_the_bound_while_both_wait(
    start_plane: Start, tmp_path: Path, weight: float, workers: int, frontends: int
) -> None:
    shared = Shared(start_plane, tmp_path, weight=weight, workers=workers, frontends=frontends)

    async def scenario() -> list[list[Look]]:
        async with shared.load("heavy", TIMES * LIGHT * workers), shared.load("light", LIGHT * workers):
            return await asyncio.gather(*(longest_wait(worker, weight) for worker in shared.workers))

    for looks in run_async(scenario()):
        differences = [one.difference for one in looks]
        assert max(differences) - min(differences) <= BOUND


async def first_tokens_s(shared: Shared, key: NewKey, count: int) -> tuple[float, float]:
    """Send requests one after another. Returns the longest time to a first token, and to an end."""
    firsts, ends = [], []
    async with aiohttp.ClientSession(headers=bearer(key)) as session:
        for _ in range(count):
            began = time.monotonic()
            url = f"{shared.plane.frontend.http}/v1/completions"
            async with session.post(url, json=COMPLETION | {"stream": True}) as response:
                await response.content.readline()
                firsts.append(time.monotonic() - began)
                await response.read()
                ends.append(time.monotonic() - began)
    return max(firsts), max(ends)


def test_light_tenant_waits_for_one_request_at_most_under_the_load_of_another(
    start_plane: Start, tmp_path: Path
) -> None:
    shared = Shared(start_plane, tmp_path, weight=1.0, workers=1, frontends=1)

    async def scenario() -> tuple[float, float, float]:
        alone_s, request_s = await first_tokens_s(shared, shared.keys["light"], 15)
        async with shared.load("heavy", TIMES * LIGHT):

            async def is_full() -> bool:
                return (await read_metrics(shared.workers[0])).waiting >= TIMES * LIGHT / 2

            await until(is_full)
            busy_s, busy_request_s = await first_tokens_s(shared, shared.keys["light"], 15)
        return busy_s, alone_s, max(request_s, busy_request_s - busy_s)

    busy_s, alone_s, request_s = run_async(scenario())

    assert busy_s <= 2 * alone_s + request_s
