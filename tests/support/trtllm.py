"""Shared by the tests of the TensorRT-LLM engine: an engine that runs on the fake package, and its outputs."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.core.request import Request, Sampling
from services.worker.engine import Output
from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine
from tests.support.doubles import make_request, run_async
from tests.worker.engines.outputs import Outputs

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8)
PROMPT = tuple(b"Tell me of the sea.")
WITHOUT_STATS = {"enable_iter_perf_stats": False}


class RunningEngine(Outputs):
    """A running engine, and the outputs that it has emitted."""

    def __init__(self, config: TrtLlmConfig) -> None:
        super().__init__()
        self.engine = TrtLlmEngine(config)

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until the condition holds. It is checked after each step, and every 20 ms."""
        while not condition():
            self.has_output.clear()
            try:
                await asyncio.wait_for(self.has_output.wait(), 0.02)
            except TimeoutError:
                continue

    async def wait_end(self, key: int) -> Output:
        await self.until(lambda: self.end(key))
        end = self.end(key)
        assert end is not None
        return end

    async def answer(self, key: int, request: Request) -> tuple[list[int], Output]:
        """Submit the request and wait for its end."""
        self.engine.submit(key, request)
        end = await self.wait_end(key)
        return self.token_ids(key), end


def play(folder: Path, scenario: Callable[[RunningEngine], Any], **config: Any) -> Any:
    """Play the scenario on a running engine, then cancel the engine. Raises the exceptions of its `run`."""

    async def played() -> Any:
        fast = {"abort_s": 0.2, "shutdown_s": 2.0, "extra": WITHOUT_STATS}
        given = {"model": folder, "served_model_name": "m", **fast, **config}
        running, ready = RunningEngine(TrtLlmConfig(**given)), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(running.engine.run(running.emit, ready))
            await ready.wait()
            result = await scenario(running)
            engine.cancel()
        return result

    return run_async(played())


def new_request(sampling: Sampling = GREEDY, *, max_tokens: int = 64, **fields: Any) -> Request:
    return make_request(PROMPT, sampling=sampling, max_tokens=max_tokens, **({"ignore_eos": True} | fields))


def llm_of(running: RunningEngine) -> Any:
    """The fake `LLM` of the engine."""
    runner = running.engine._runner
    assert runner is not None
    return runner._client.llm
