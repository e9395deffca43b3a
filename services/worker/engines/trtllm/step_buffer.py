"""Collects the outputs of one turn of the event loop and emits them as one step.

The engine sends one message for each step, and its client wakes the readers of all requests in one turn of the loop.
The outputs that they read in that turn are emitted together: a step of a thousand requests is one call.
"""

import asyncio
from collections.abc import Callable

from services.worker.engine import Emit, Output


class StepBuffer:
    """Buffers the outputs of a step. `on_step`: called once for each step, even if it has no outputs left to emit."""

    def __init__(self, emit: Emit, on_step: Callable[[], None]) -> None:
        self._emit = emit
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[int, Output] = {}
        self._is_due = False

    def step_soon(self) -> None:
        """Record that the engine has made a step; it is emitted at the end of this turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._step)

    def add(self, output: Output) -> None:
        """Emit the output with the current step. Several outputs of one request are merged."""
        self.step_soon()
        earlier = self._outputs.get(output.key)
        self._outputs[output.key] = output if earlier is None else _merged(earlier, output)

    def forget(self, key: int) -> None:
        """Discard the request's outputs that are not emitted yet."""
        self._outputs.pop(key, None)

    def _step(self) -> None:
        self._is_due = False
        outputs, self._outputs = self._outputs, {}
        self._on_step()
        if outputs:
            self._emit(list(outputs.values()))


def _merged(first: Output, second: Output) -> Output:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    token_ids = [*first.token_ids, *second.token_ids]
    return Output(first.key, token_ids, second.finish, second.failure, logprobs)
