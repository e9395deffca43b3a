"""Clients in other languages need only the published proto file, and lose nothing when their worker is killed."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import Reported, run, steps
from tests.clients.support.toolchains import CLIENTS, CONNECT, Client
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import wait_until

TOKENS = 120
ENOUGH = 5


@pytest.mark.parametrize("port", ["grpc", "http"])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_generated_from_the_proto_file_completes_every_step(cluster: Cluster, client: Client, port: str) -> None:
    """On both ports, which speak everything."""
    need(client.missing)
    frontend = cluster.plane.frontend
    check_steps(cluster, client.name, [*client.command(), frontend.grpc if port == "grpc" else address(frontend)])


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_client_of_grpc_web_completes_every_step_over_http1(cluster: Cluster, port: str) -> None:
    """Connect's client for pages, with Node's `fetch`."""
    need(CONNECT.missing)
    frontend = cluster.plane.frontend
    server = frontend.grpc if port == "grpc" else address(frontend)
    check_steps(cluster, "connect", [*CONNECT.command(), "--web", server])


def address(frontend: Frontend) -> str:
    """The HTTP port of a frontend as HOST:PORT."""
    return frontend.http.removeprefix("http://")


def check_steps(cluster: Cluster, name: str, command: list[str]) -> None:
    """Run the program of a client, whose request ids begin with `name`, and check each step that it reports."""
    frontend = cluster.plane.frontend
    moves = len(frontend.moves(f"{name}-lost_worker"))
    cancel = {"request_id": f"{name}-cancel", "outcome": "CANCELLED"}
    cancels = len(frontend.events_until_now("request", **cancel))

    reported = asyncio.run(run(cluster, command))

    check_answer(reported["stream"])
    assert reported["cancel"]["status"] == "CANCELLED"
    assert ENOUGH <= reported["cancel"]["tokens"] < TOKENS
    check_refusal(reported["refusal"])
    assert reported["deadline"]["status"] == "DEADLINE_EXCEEDED"
    assert reported["deadline"]["tokens"] > 0
    assert reported["deadline"].get("reason") in (None, "DEADLINE_EXCEEDED"), "the client's own timer may fire first"
    assert reported["lost_worker"] == reported["stream"]
    (move,) = frontend.moves(f"{name}-lost_worker")[moves:]
    assert move["reason"] == "DISCONNECTED"
    wait_until(lambda: len(frontend.events("request", **cancel)) > cancels)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_resumes_at_another_frontend_when_its_own_is_killed(cluster: Cluster, client: Client) -> None:
    need(client.missing)
    check_resume(cluster, client.command(), lambda frontend: frontend.grpc)


def test_client_of_grpc_web_resumes_at_another_frontend_when_its_own_is_killed(cluster: Cluster) -> None:
    need(CONNECT.missing)
    check_resume(cluster, [*CONNECT.command(), "--web"], address)


def check_resume(cluster: Cluster, command: list[str], address_of: Callable[[Frontend], str]) -> None:
    """Run the program with two frontends, of which the first is killed, and check that nothing was lost."""

    async def test() -> tuple[Reported, float]:
        first = await cluster.another_frontend()

        async def kill() -> None:
            first.kill()

        before = await cluster.generated()
        reported = await steps([*command, address_of(first), address_of(cluster.plane.frontend)], kill)
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
