"""Gathers what comes for all requests in one turn of the event loop into one step.

The engine sends one message for a step, and its client wakes the readers of all its requests in one turn. What they
have read by the end of that turn leaves together: a step of a thousand requests is emitted once.
"""

import asyncio
from collections.abc import Callable

from services.worker.engine import Emit, Output


class StepBuffer:
    """on_step: called before each step is emitted, also when nobody wants anything of it any more."""

    def __init__(self, emit: Emit, on_step: Callable[[], None]) -> None:
        self._emit = emit
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._outputs: dict[int, Output] = {}
        self._is_due = False

    def step_soon(self) -> None:
        """There is news of the engine: a step has been made."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._step)

    def add(self, output: Output) -> None:
        """To be emitted with the step that is under way. Several of one request become one."""
        self.step_soon()
        earlier = self._outputs.get(output.key)
        self._outputs[output.key] = output if earlier is None else _joined(earlier, output)

    def forget(self, key: int) -> None:
        """Nothing of it is to be emitted any more."""
        self._outputs.pop(key, None)

    def _step(self) -> None:
        self._is_due = False
        outputs, self._outputs = self._outputs, {}
        self._on_step()
        if outputs:
            self._emit(list(outputs.values()))


def _joined(first: Output, second: Output) -> Output:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    token_ids = [*first.token_ids, *second.token_ids]
    return Output(first.key, token_ids, second.finish, second.failure, logprobs)
