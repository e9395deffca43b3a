"""Shared by the tests of the mocker: a running engine, and requests to it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.core.request import Request, Sampling
from services.worker.engine import Output
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request, run_async

GREEDY = Sampling(temperature=0.0, seed=1)
SEEDED = Sampling(temperature=0.8, seed=1)
PROMPT = tuple(b"Tell me of the sea.")


class RunningEngine:
    """A running engine, and the outputs that it has emitted, step by step."""

    def __init__(self, config: MockerConfig) -> None:
        self.engine = MockerEngine(config)
        self.steps: list[Sequence[Output]] = []
        self._has_output = asyncio.Event()

    def emit(self, outputs: Sequence[Output]) -> None:
        self.steps.append(outputs)
        self._has_output.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._has_output.clear()
            await self._has_output.wait()

    def token_ids(self, key: int) -> list[int]:
        return [token for step in self.steps for output in step if output.key == key for token in output.token_ids]

    def end(self, key: int) -> Output | None:
        ends = [
            output for step in self.steps for output in step if output.key == key and (output.finish or output.failure)
        ]
        assert len(ends) <= 1
        return ends[0] if ends else None


def run(
    scenario: Callable[[RunningEngine], Any], *requests: Request, faults: Faults | None = None, **config: Any
) -> Any:
    """Submit the requests with keys 1, 2, …, then play the scenario on the running engine."""

    async def play() -> Any:
        running = RunningEngine(MockerConfig(**({"itl_ms": 0.0} | config), faults=faults or Faults()))
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(running.engine.run(running.emit, asyncio.Event()))
            for key, request in enumerate(requests, start=1):
                running.engine.submit(key, request)
            result = await scenario(running)
            engine.cancel()
        return result

    return run_async(play())


def new_request(sampling: Sampling = GREEDY, *, max_tokens: int = 64, **fields: Any) -> Request:
    return make_request(PROMPT, sampling=sampling, max_tokens=max_tokens, **({"ignore_eos": True} | fields))
