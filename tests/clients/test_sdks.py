"""Stock SDKs need our address alone, and lose nothing when their worker is killed.

What an SDK makes of our answers is told by its program, a line of JSON for each step. A step that is in CHECKS must be
what that says of it, whichever SDK takes it. NEEDED are those that each takes.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.cluster import Cluster
from tests.clients.conftest import need
from tests.clients.programs import run
from tests.clients.toolchains import SDKS, Client

TOKENS = 120
NEEDED = {"unary", "stream", "lost_worker"}
"""The same question each time. They tell `id`, `text`, `finish_reason` and `usage`, with OpenAI's names in it."""


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.name)
def test_a_stock_sdk_needs_nothing_but_our_address(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)
    frontend = cluster.plane.frontend

    told = asyncio.run(run(cluster, [*sdk.command(), f"{frontend.http}/v1"]))

    assert told.keys() >= NEEDED
    for step in told.keys() & CHECKS.keys():
        CHECKS[step](told[step])
    assert answer(told["stream"]) == answer(told["unary"])
    assert answer(told["lost_worker"]) == answer(told["unary"])
    (move,) = frontend.moves(request_id(told["lost_worker"]))
    assert move["reason"] == "DISCONNECTED"


def answer(step: dict[str, Any]) -> dict[str, Any]:
    """Without what is another in every answer."""
    return {name: value for name, value in step.items() if name not in {"step", "id"}}


def request_id(step: dict[str, Any]) -> str:
    """The request's, which is a part of the answer's."""
    return str(step["id"]).removeprefix("chatcmpl-")


def check_unary(step: dict[str, Any]) -> None:
    assert step["text"]
    assert step["finish_reason"] == "length"
    usage = step["usage"]
    assert usage["completion_tokens"] == TOKENS
    assert usage["prompt_tokens"] + TOKENS == usage["total_tokens"]


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "unary": check_unary,
}
