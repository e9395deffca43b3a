"""Clients in other languages need only the published proto file, and lose nothing when their worker is killed."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import Reported, run, steps
from tests.clients.support.toolchains import CLIENTS, Client
from tests.integration.harness.waiting import wait_until

TOKENS = 120
ENOUGH = 5


@pytest.mark.parametrize("port", ["grpc", "http"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_generated_from_the_proto_file_completes_every_step(cluster: Cluster, client: Client, port: str) -> None:
    """On both ports: that of grpc.aio's server, and that of our own."""
    need(client.missing)
    frontend = cluster.plane.frontend
    command = [*client.command(), frontend.grpc if port == "grpc" else frontend.http.removeprefix("http://")]
    moves = len(frontend.moves(f"{client.name}-lost_worker"))

    reported = asyncio.run(run(cluster, command))

    check_answer(reported["stream"])
    assert reported["cancel"]["status"] == "CANCELLED"
    assert ENOUGH <= reported["cancel"]["tokens"] < TOKENS
    check_refusal(reported["refusal"])
    assert reported["deadline"]["status"] == "DEADLINE_EXCEEDED"
    assert reported["deadline"]["tokens"] > 0
    assert reported["deadline"].get("reason") in (None, "DEADLINE_EXCEEDED"), "the client's own timer may fire first"
    assert reported["lost_worker"] == reported["stream"]
    (move,) = frontend.moves(f"{client.name}-lost_worker")[moves:]
    assert move["reason"] == "DISCONNECTED"
    cancelled = {"request_id": f"{client.name}-cancel", "outcome": "CANCELLED"}
    wait_until(lambda: cluster.plane.frontend.events("request", **cancelled))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_resumes_at_another_frontend_when_its_own_is_killed(cluster: Cluster, client: Client) -> None:
    need(client.missing)

    async def test() -> tuple[Reported, float]:
        first = await cluster.another_frontend()

        async def kill() -> None:
            first.kill()

        before = await cluster.generated()
        reported = await steps([*client.command(), first.grpc, cluster.plane.frontend.grpc], kill)
        assert first.status() is not None
        return reported, await cluster.generated() - before

    reported, computed = asyncio.run(test())

    check_answer(reported["undisturbed"])
    assert reported["resumed"] == reported["undisturbed"]
    assert computed == 2 * TOKENS, "nothing was computed twice"


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_asks_anew_if_no_frontend_knows_its_request(cluster: Cluster, client: Client) -> None:
    need(client.missing)

    async def test() -> Reported:
        gone = await cluster.another_frontend()
        gone.kill()

        async def go_on() -> None:
            pass

        return await steps([*client.command(), gone.grpc, cluster.plane.frontend.grpc], go_on)

    reported = asyncio.run(test())

    assert reported["resumed"] == reported["undisturbed"]


def check_answer(step: dict[str, Any]) -> None:
    assert len(step["token_ids"]) == TOKENS
    assert step["text"]
    assert step["finish_reason"] == "FINISH_REASON_LENGTH"


def check_refusal(step: dict[str, Any]) -> None:
    assert step["status"] == "RESOURCE_EXHAUSTED"
    assert step["reason"] in ("OVERLOADED", "WORKER_AT_CAPACITY")
    assert step["domain"] == "unbroken"
    assert step["metadata"]["retryable"] == "true"
    assert step["metadata"]["cause"] == "capacity"
    assert 0.5 < step["retry_after_s"] < 60
