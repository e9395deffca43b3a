"""What comes in one turn of the loop leaves as one step."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from services.core.interface import TokenLogprobs
from services.core.request import FinishReason
from services.worker.engine import Output
from services.worker.engines.trtllm.step_buffer import StepBuffer
from tests.support.doubles import run_async


def play(scenario: Callable[[StepBuffer], Any]) -> list[Sequence[Output] | None]:
    """What was emitted; None for each step that was made."""

    async def played() -> list[Sequence[Output] | None]:
        told: list[Sequence[Output] | None] = []
        await scenario(StepBuffer(told.append, lambda: told.append(None)))
        await asyncio.sleep(0)
        return told

    return run_async(played())


def test_all_of_a_turn_is_one_step() -> None:
    async def scenario(gathering: StepBuffer) -> None:
        gathering.add(Output(1, [5]))
        gathering.add(Output(2, [6]))
        await asyncio.sleep(0)
        gathering.add(Output(1, [7]))

    assert play(scenario) == [None, [Output(1, [5]), Output(2, [6])], None, [Output(1, [7])]]


def test_several_of_one_request_become_one_with_the_last_ones_end() -> None:
    async def scenario(gathering: StepBuffer) -> None:
        one, two = TokenLogprobs(-1.0), TokenLogprobs(-2.0)
        gathering.add(Output(1, [5], logprobs=[one]))
        gathering.add(Output(1, [6], FinishReason.STOP, logprobs=[two]))

    expected = Output(1, [5, 6], FinishReason.STOP, logprobs=[TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert play(scenario) == [None, [expected]]


def test_nothing_of_a_request_is_emitted_once_it_is_forgotten() -> None:
    async def scenario(gathering: StepBuffer) -> None:
        gathering.add(Output(1, [5]))
        gathering.forget(1)

    assert play(scenario) == [None]


def test_a_step_without_anything_to_tell_is_a_step() -> None:
    async def scenario(gathering: StepBuffer) -> None:
        gathering.step_soon()
        gathering.step_soon()

    assert play(scenario) == [None]
