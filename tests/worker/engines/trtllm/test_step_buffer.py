"""The step buffer: outputs of one turn of the event loop are emitted as one step."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.core.interface import TokenLogprobs
from services.core.request import FinishReason
from services.worker.engine import Output
from services.worker.engines.trtllm.step_buffer import StepBuffer
from tests.support.doubles import run_async


def play(scenario: Callable[[StepBuffer], Any]) -> list[Sequence[Output] | None]:
    """The emitted outputs, and None for each call of `on_step`."""

    async def played() -> list[Sequence[Output] | None]:
        calls: list[Sequence[Output] | None] = []
        await scenario(StepBuffer(calls.append, lambda: calls.append(None)))
        await asyncio.sleep(0)
        return calls

    return run_async(played())


def test_outputs_of_one_turn_are_one_step() -> None:
    async def scenario(steps: StepBuffer) -> None:
        steps.add(Output(1, [5]))
        steps.add(Output(2, [6]))
        await asyncio.sleep(0)
        steps.add(Output(1, [7]))

    assert play(scenario) == [None, [Output(1, [5]), Output(2, [6])], None, [Output(1, [7])]]


def test_outputs_of_one_request_are_merged_and_keep_the_last_finish() -> None:
    async def scenario(steps: StepBuffer) -> None:
        one, two = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
        steps.add(Output(1, [5], logprobs=[one]))
        steps.add(Output(1, [6], FinishReason.STOP, logprobs=[two]))

    expected = Output(1, [5, 6], FinishReason.STOP, logprobs=[TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert play(scenario) == [None, [expected]]


def test_forgotten_request_emits_nothing() -> None:
    async def scenario(steps: StepBuffer) -> None:
        steps.add(Output(1, [5]))
        steps.forget(1)

    assert play(scenario) == [None]


def test_step_without_outputs_is_counted_once() -> None:
    async def scenario(steps: StepBuffer) -> None:
        steps.step_soon()
        steps.step_soon()

    assert play(scenario) == [None]
