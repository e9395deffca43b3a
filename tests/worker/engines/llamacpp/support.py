"""Shared by the tests of the llama.cpp engine: one engine on one event loop, and requests to it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.core.errors import Failure
from services.core.request import FinishReason, Guided, GuidedKind, Request, Sampling, Stop
from services.models.download import resolve
from services.worker.engine import Output
from services.worker.engines.llamacpp import LlamaCppConfig, LlamaCppEngine
from tests.support.clock import WAIT_S

PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
EOS = 2
CONTEXT_LENGTH = 96
YES_OR_NO = Guided(GuidedKind.CHOICE, ("yes", "no"))


class Bench:
    """One engine on one event loop for all tests, because loading it takes seconds. Records the outputs by key."""

    def __init__(self) -> None:
        config = LlamaCppConfig(
            path=resolve("smollm2"), served_model_name="tiny", sequences=3, context_length=CONTEXT_LENGTH
        )
        self.engine = LlamaCppEngine(config)
        self.outputs: list[Output] = []
        self._key = 0
        self._changed = asyncio.Event()

    def emit(self, outputs: Sequence[Output]) -> None:
        self.outputs += outputs
        self._changed.set()

    def submit(self, request: Request) -> int:
        self._key += 1
        self.engine.submit(self._key, request)
        return self._key

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def of(self, key: int) -> list[Output]:
        return [output for output in self.outputs if output.key == key]

    def tokens(self, key: int) -> list[int]:
        return [token for output in self.of(key) for token in output.token_ids]

    def finish(self, key: int) -> FinishReason | None:
        outputs = self.of(key)
        return outputs[-1].finish if outputs else None

    async def failure(self, request: Request) -> Failure:
        """Run one request until it fails. Returns the failure."""
        key = self.submit(request)
        await self.until(lambda: any(output.failure for output in self.of(key)))
        failure = self.of(key)[-1].failure
        assert failure is not None
        return failure

    async def answer(self, request: Request) -> tuple[list[int], FinishReason | None]:
        """Run one request to its end. Returns its tokens and its finish reason."""
        key = self.submit(request)
        await self.until(lambda: self.finish(key) is not None)
        return self.tokens(key), self.finish(key)


def request(
    *,
    prompt: Sequence[int] = PROMPT,
    max_tokens: int = 4,
    sampling: Sampling | None = None,
    guided: Guided | None = None,
    **stop: Any,
) -> Request:
    return Request(
        model="tiny",
        token_ids=tuple(prompt),
        guided=guided,
        sampling=sampling or Sampling(temperature=0),
        stop=Stop(max_tokens=max_tokens, **stop),
    )
