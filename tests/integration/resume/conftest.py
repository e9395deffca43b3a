"""The kinds of requests whose answers are resumed, and a plane with two frontends and two workers."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.cases import CASES, SEEDED, TOKENS, with_stops
from tests.integration.harness.clients.requests import json_body
from tests.integration.harness.clients.returning import Returning, ReturningClient
from tests.integration.harness.clients.returning_grpc import GrpcReturningClient
from tests.integration.harness.clients.send import answer
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

PACE = "--mocker-itl-ms=40"
"""An answer takes 2.6 s: dozens of them are still under way when all clients have the first events of theirs."""
PLAIN = json_body(SEEDED)
OTHERS: Mapping[str, dict[str, Any]] = {
    "several prompts": {**PLAIN, "prompt": ["One", "Two", "Three"], "n": 2, "logprobs": 2},
    "echo": {**PLAIN, "echo": True},
    "usage in events": {**PLAIN, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
ENDLESS = {**PLAIN, "max_tokens": 100_000}


@dataclass
class Pair:
    """A plane with two frontends and two workers. `kinds`: see `kinds_of`."""

    plane: Plane
    other: Frontend
    workers: list[Process]
    kinds: Mapping[str, Returning]

    def clients(self, is_meant: Callable[[Returning], bool] = lambda _: True) -> dict[str, Returning]:
        """A client of each kind, or of each that is meant, which has nothing yet."""
        return {name: client.anew() for name, client in self.kinds.items() if is_meant(client)}

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend

    @property
    def computed(self) -> "Computed":
        return Computed(self.workers)


@dataclass
class Computed:
    """What the engines of some workers have computed, by their own counters."""

    workers: list[Process]

    async def tokens(self) -> tuple[float, float]:
        """Prompt tokens and generated tokens."""
        metrics = [await read_metrics(worker) for worker in self.workers]
        return sum(one.prompt_tokens for one in metrics), sum(one.generated_tokens for one in metrics)


async def kinds_of(frontend: Frontend) -> Mapping[str, Returning]:
    """A client of each kind of request: over SSE, the same with token ids, and over gRPC, which always has them.

    The stop strings are in the middle of the answer. Over gRPC there are no kinds of OTHERS.
    """
    seeded = await answer(frontend, replace(SEEDED, protocol="grpc"))
    cases = {**CASES, **with_stops(seeded)}
    plain = {name: json_body(request) for name, request in cases.items()} | dict(OTHERS)
    bodies = plain | {f"{name} with token ids": {**body, "return_token_ids": True} for name, body in plain.items()}
    over_grpc = {f"{name} over gRPC": GrpcReturningClient(request) for name, request in cases.items()}
    return {name: ReturningClient(body) for name, body in bodies.items()} | over_grpc


def wholes(clients: Mapping[str, Returning]) -> dict[str, Any]:
    """All that each client has, which must be complete."""
    return {name: client.whole for name, client in clients.items()}


async def start_pair(start_plane: Start, *, frontend: tuple[str, ...] = (), worker: tuple[str, ...] = ()) -> Pair:
    plane = start_plane(frontend=frontend)
    other = plane.start_frontend(*frontend)
    workers = [await plane.worker(PACE, *worker) for _ in range(2)]
    await until(lambda: all(other.has_found(worker) for worker in workers))
    return Pair(plane, other, workers, await kinds_of(other))


@pytest.fixture
def pair(start_plane: Start) -> Pair:
    return asyncio.run(start_pair(start_plane))


__all__ = ["ENDLESS", "PACE", "PLAIN", "TOKENS", "Pair", "kinds_of", "pair", "start_pair", "wholes"]
