"""Shared by the tests of the mocker: a running engine, and requests to it."""

import asyncio
from collections.abc import Callable
from typing import Any

from services.core.request import Request, Sampling
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request, run_async
from tests.worker.engines.outputs import Outputs

GREEDY = Sampling(temperature=0.0, seed=1)
SEEDED = Sampling(temperature=0.8, seed=1)
PROMPT = tuple(b"Tell me of the sea.")


class RunningEngine(Outputs):
    """A running engine, and the outputs that it has emitted."""

    def __init__(self, config: MockerConfig) -> None:
        super().__init__()
        self.engine = MockerEngine(config)

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self.has_output.clear()
            await self.has_output.wait()


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
