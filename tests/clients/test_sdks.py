"""Stock SDKs need our address alone, and lose nothing when their worker is killed.

What an SDK makes of our answers is told by its program, a line of JSON for each step. A step that is in CHECKS must be
what that says of it, whichever SDK takes it. NEEDED are those that each takes.
"""

import asyncio

import pytest

from tests.clients.cluster import Cluster
from tests.clients.conftest import need
from tests.clients.programs import run
from tests.clients.sdk_checks import CHECKS, SAME, Step, request_id
from tests.clients.toolchains import SDKS, Client

NEEDED = {"unary", "stream", "lost_worker"}
"""The same question each time. They tell `id`, `text`, `finish_reason` and `usage`, with OpenAI's names in it."""


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.name)
def test_a_stock_sdk_needs_nothing_but_our_address(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)
    frontend = cluster.plane.frontend

    told = asyncio.run(run(cluster, [*sdk.command(), f"{frontend.http}/v1"]))

    assert NEEDED <= told.keys() <= CHECKS.keys() | SAME.keys() | {"begun"}
    for step in told.keys() & CHECKS.keys():
        CHECKS[step](told[step], frontend)
    for step in told.keys() & SAME.keys():
        assert answer(told[step]) == answer(told[SAME[step]])
    (move,) = frontend.moves(request_id(told["lost_worker"]))
    assert move["reason"] == "DISCONNECTED"


def answer(step: Step) -> Step:
    """Without what is another in every answer."""
    return {name: value for name, value in step.items() if name not in {"step", "id"}}
