"""Stock SDKs with the HTTP client of `unbroken-client` lose nothing when the frontend of their answer is killed.

The program for each SDK takes the name of a step and the addresses of two frontends. It prints two answers, of which
the second one began at the first frontend, and `begun` when this frontend is to be killed.
"""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import steps
from tests.clients.support.toolchains import HEALING, Client
from tests.integration.harness.clients.answers import Refused
from tests.integration.harness.clients.returning import ReturningClient
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until

STEPS = {"healing_python": ("stream", "whole", "async_stream", "async_whole"), "healing_node": ("stream", "whole")}
TOKENS = 240
"""Of one answer, with both of its choices."""

Nemesis = Callable[[Frontend], Awaitable[None]]


@pytest.mark.parametrize(
    ("sdk", "step"),
    [pytest.param(sdk, step, id=f"{sdk.name}-{step}") for sdk in HEALING for step in STEPS[sdk.name]],
)
def test_answer_survives_the_kill_of_its_frontend(cluster: Cluster, sdk: Client, step: str) -> None:
    need(sdk.missing)

    async def kill(first: Frontend) -> None:
        await until(lambda: is_running(cluster))
        first.kill()

    async def test() -> tuple[dict[str, Any], float]:
        await cluster.fill()
        before = await cluster.generated()
        return await answers(cluster, sdk, step, kill), await cluster.generated() - before

    reported, computed = asyncio.run(test())

    assert reported["healed"] == reported["undisturbed"]
    assert reported["healed"]["usage"]["completion_tokens"] == TOKENS
    assert computed == 2 * TOKENS, "nothing was computed twice"


@pytest.mark.parametrize("sdk", HEALING, ids=lambda sdk: sdk.name)
def test_stream_with_token_ids_survives_the_kill_of_its_frontend_and_of_all_workers(
    cluster: Cluster, sdk: Client
) -> None:
    need(sdk.missing)

    async def kill(first: Frontend) -> None:
        first.kill()
        for worker in cluster.workers:
            worker.kill()
        await until(lambda: all(worker.status() is not None for worker in cluster.workers))
        await cluster.fill()

    reported = asyncio.run(answers(cluster, sdk, "lost_plane", kill))

    assert reported["healed"] == reported["undisturbed"]


@pytest.mark.parametrize("sdk", HEALING, ids=lambda sdk: sdk.name)
def test_stream_goes_on_elsewhere_when_its_frontend_is_frozen(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)

    async def freeze(first: Frontend) -> None:
        first.signal(signal.SIGSTOP)

    reported = asyncio.run(answers(cluster, sdk, "frozen", freeze))

    assert reported["healed"] == reported["undisturbed"]


@pytest.mark.parametrize("sdk", HEALING, ids=lambda sdk: sdk.name)
def test_stream_that_its_program_leaves_is_cancelled(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)

    async def kill(first: Frontend) -> None:
        raise AssertionError("nothing is killed")

    async def test() -> None:
        left = (await answers(cluster, sdk, "left", kill))["left"]
        await ReturningClient({}, generation_id=left["id"]).come_back(cluster.plane.frontend)

    with pytest.raises(Refused) as refused:
        asyncio.run(test())
    assert refused.value.reason == "STREAM_NOT_FOUND", "the answer is not kept for a client that comes back"


async def answers(cluster: Cluster, sdk: Client, step: str, kill: Nemesis) -> dict[str, Any]:
    """Run the program; return what it reports. `kill` is called with the first frontend at `begun`."""
    first = await cluster.another_frontend()
    command = [*sdk.command(), step, first.http, cluster.plane.frontend.http]
    reported = await steps(command, lambda: kill(first))
    first.kill()
    return reported


async def is_running(cluster: Cluster) -> bool:
    return any([(await read_metrics(worker)).running for worker in cluster.workers])
