"""The kinds of requests whose answers are resumed, and a plane with two frontends and two workers."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.integration.conftest import Start
from tests.integration.harness.clients.cases import CASES, SEEDED, TOKENS, with_stops
from tests.integration.harness.clients.requests import json_body
from tests.integration.harness.clients.send import answer
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

PACE = "--mocker-itl-ms=15"
PLAIN = json_body(SEEDED)
OTHERS: Mapping[str, dict[str, Any]] = {
    "several prompts": {**PLAIN, "prompt": ["One", "Two", "Three"], "n": 2, "logprobs": 2},
    "echo": {**PLAIN, "echo": True},
    "usage in events": {**PLAIN, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
ENDLESS = {**PLAIN, "max_tokens": 100_000}


@dataclass
class Pair:
    """A plane with two frontends and two workers. `bodies`: one of each kind of request, twice: with token ids too."""

    plane: Plane
    other: Frontend
    workers: list[Process]
    bodies: Mapping[str, dict[str, Any]]

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


async def bodies_of(frontend: Frontend) -> Mapping[str, dict[str, Any]]:
    """The body of each kind. The stop strings are in the middle of the answer."""
    seeded = await answer(frontend, replace(SEEDED, protocol="grpc"))
    cases = {**CASES, **with_stops(seeded)}
    plain = {name: json_body(request) for name, request in cases.items()} | dict(OTHERS)
    return plain | {f"{name} with token ids": {**body, "return_token_ids": True} for name, body in plain.items()}


async def start_pair(start_plane: Start, *, frontend: tuple[str, ...] = (), worker: tuple[str, ...] = ()) -> Pair:
    plane = start_plane(frontend=frontend)
    other = plane.start_frontend(*frontend)
    workers = [await plane.worker(PACE, *worker) for _ in range(2)]
    await until(lambda: all(other.has_found(worker) for worker in workers))
    return Pair(plane, other, workers, await bodies_of(other))


@pytest.fixture
def pair(start_plane: Start) -> Pair:
    return asyncio.run(start_pair(start_plane))


__all__ = ["ENDLESS", "PACE", "PLAIN", "TOKENS", "Pair", "pair", "start_pair"]
