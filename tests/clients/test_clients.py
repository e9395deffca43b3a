"""Clients in other languages need the published proto files alone, and lose nothing when their worker is killed."""

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import run
from tests.clients.support.toolchains import CLIENTS, Client

TOKENS = 120
ENOUGH = 5


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_made_from_the_proto_files_does_all_that_they_promise(cluster: Cluster, client: Client) -> None:
    need(client.missing)
    command = [*client.command(), cluster.plane.frontend.grpc]

    told = asyncio.run(run(cluster, command))

    check_answer(told["stream"])
    assert told["cancel"]["status"] == "CANCELLED"
    assert ENOUGH <= told["cancel"]["tokens"] < TOKENS
    check_refusal(told["refusal"])
    assert told["deadline"]["status"] == "DEADLINE_EXCEEDED"
    assert told["deadline"]["tokens"] > 0
    assert told["deadline"].get("reason") in (None, "DEADLINE_EXCEEDED"), "gRPC's clock and ours run side by side"
    assert told["lost_worker"] == told["stream"] | {"step": "lost_worker"}
    (move,) = cluster.plane.frontend.moves(f"{client.name}-lost_worker")
    assert move["reason"] == "DISCONNECTED"
    assert cluster.plane.frontend.events("request", request_id=f"{client.name}-cancel", outcome="CANCELLED")


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
