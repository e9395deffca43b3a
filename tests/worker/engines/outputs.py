"""Records the outputs of an engine, step by step, for the tests of every engine."""

import asyncio
from collections.abc import Sequence

from services.worker.engine import Output


class Outputs:
    """The outputs that an engine has emitted. `has_output`: set by each step; whoever waits for it clears it."""

    def __init__(self) -> None:
        self.steps: list[Sequence[Output]] = []
        self.has_output = asyncio.Event()

    def emit(self, outputs: Sequence[Output]) -> None:
        self.steps.append(outputs)
        self.has_output.set()

    def outputs(self, key: int) -> list[Output]:
        return [output for step in self.steps for output in step if output.key == key]

    def token_ids(self, key: int) -> list[int]:
        return [token for output in self.outputs(key) for token in output.token_ids]

    def end(self, key: int) -> Output | None:
        ends = [output for output in self.outputs(key) if output.finish or output.failure]
        assert len(ends) <= 1
        assert not ends or ends[0] is self.outputs(key)[-1], "an output followed the end"
        return ends[0] if ends else None
