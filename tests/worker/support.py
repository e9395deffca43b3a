"""An engine whose steps the test makes."""

import asyncio
from collections.abc import Sequence

from services.card import ModelCard
from services.request import FinishReason, Request
from services.worker.engine import Emit, EngineLoad, Output, RankLoad
from tests.support import CARD


class ManualEngine:
    """Keeps what it is given; `step` emits. `refusal` is raised by the next submit, `cancel_bug` by every cancel."""

    def __init__(self, request_limit: int = 1024, content: bytes = b"", card: ModelCard = CARD) -> None:
        self.card = card
        self.request_limit = request_limit
        self.requests: dict[int, Request] = {}
        self.submitted: list[Request] = []
        self.running_count_max = 0
        self.refusal: Exception | None = None
        self.cancel_bug: Exception | None = None
        self._content = content
        self._emit: Emit | None = None

    def tokenizer_content(self) -> bytes:
        return self._content

    def attach(self, emit: Emit) -> None:
        self._emit = emit

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        self.attach(emit)
        ready.set()
        await asyncio.Event().wait()

    def submit(self, key: int, request: Request) -> None:
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        assert key not in self.requests
        self.requests[key] = request
        self.submitted.append(request)
        self.running_count_max = max(self.running_count_max, len(self.requests))

    def cancel(self, key: int) -> None:
        self.requests.pop(key, None)
        if self.cancel_bug is not None:
            raise self.cancel_bug

    def load(self) -> EngineLoad:
        return EngineLoad(7, (RankLoad(len(self.requests), 9, 3),))

    def step(self, *outputs: Output) -> None:
        assert self._emit is not None
        for output in outputs:
            if output.finish is not None or output.failure is not None:
                self.requests.pop(output.key, None)
        self._emit(outputs)

    def give(self, key: int, token_ids: Sequence[int], finish: FinishReason | None = None) -> None:
        self.step(Output(key, token_ids, finish))

    def key_of(self, prompt: Sequence[int]) -> int:
        return next(key for key, request in self.requests.items() if request.token_ids == tuple(prompt))
