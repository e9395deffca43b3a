"""The order of the worker's layers: swapping any two neighbours is noticed."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from services.core.call import Call
from services.core.common_layers import stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Layer
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from services.worker.pipeline import worker_layers
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import CARD, call_layer, make_request
from tests.support.manual_worker import ManualEngine

Scenario = Callable[[int | None], Coroutine[Any, Any, None]]


class Bench:
    """The pipeline over an engine with one slot and one place, with two neighbouring layers swapped on demand."""

    def __init__(self, swapped: int | None, gate: Gate | None = None) -> None:
        self.engine = ManualEngine()
        self.execute = Execute(self.engine, Limits(slots=1, places=1))
        self.engine.attach(self.execute.emit)
        layers = worker_layers(gate=gate or Gate(), card_of=lambda: CARD, rng=random.Random(1))
        if swapped is not None:
            layers[swapped], layers[swapped + 1] = layers[swapped + 1], layers[swapped]
        self.names = [layer.func.__name__ if isinstance(layer, partial) else layer.__name__ for layer in layers]
        self.call: Layer = stack(*layers, innermost=self.execute)

    async def failure(self, **call: Any) -> Failure:
        with pytest.raises(Failure) as caught:
            await call_layer(self.call, make_request(), **call)
        return caught.value


async def a_bug_in_the_gate_is_an_internal_failure(swapped: int | None) -> None:
    class BrokenGate(Gate):
        def enter(self, call: Call) -> None:
            raise ValueError("bug")

    assert (await Bench(swapped, BrokenGate()).failure()).reason is Reason.INTERNAL


async def a_refusal_by_a_draining_worker_sets_no_timer(swapped: int | None) -> None:
    gate, loop, timers = Gate(), asyncio.get_running_loop(), list[Any]()
    gate.is_draining = True
    call_at = loop.call_at

    def noted(*arguments: Any, **options: Any) -> asyncio.TimerHandle:
        timers.append(arguments)
        return call_at(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "call_at", noted)
        failure = await Bench(swapped, gate).failure(deadline=loop.time() + 9)

    assert failure.reason is Reason.DRAINING
    assert not timers


PAIRS: dict[tuple[str, str], Scenario] = {
    ("Guard", "Accept"): a_bug_in_the_gate_is_an_internal_failure,
    ("Accept", "Deadline"): a_refusal_by_a_draining_worker_sets_no_timer,
}
"""The neighbours whose order shows. Validate does not wait, so its order with Deadline does not show."""


def test_layers_stand_in_their_order() -> None:
    names = run_clocked(names_of())

    assert names == ["Guard", "Accept", "Deadline", "Validate"]
    assert list(itertools.pairwise(names))[: len(PAIRS)] == list(PAIRS)


async def names_of() -> list[str]:
    return Bench(None).names


@pytest.mark.parametrize("scenario", PAIRS.values(), ids=lambda scenario: scenario.__name__)
def test_neighbours_in_order_behave_as_described(scenario: Scenario) -> None:
    run_clocked(scenario(None))


@pytest.mark.parametrize(("index", "scenario"), list(enumerate(PAIRS.values())))
def test_swapped_neighbours_are_noticed(index: int, scenario: Scenario) -> None:
    with pytest.raises((AssertionError, ValueError)):
        run_clocked(scenario(index))


def test_deadline_covers_the_wait_for_a_slot() -> None:
    async def scenario() -> Failure:
        bench = Bench(None)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(call_layer(bench.call, make_request()))
            waiting = group.create_task(bench.failure(deadline=5.0))
            await settle()
            assert (bench.execute.running_count, bench.execute.waiting_count) == (1, 1)
            pass_time(5)
            failure = await waiting
            running.cancel()
        return failure

    assert run_clocked(scenario()).reason is Reason.DEADLINE_EXCEEDED


def test_invalid_request_takes_no_place() -> None:
    async def scenario() -> None:
        bench = Bench(None)

        with pytest.raises(Failure) as raised:
            await call_layer(bench.call, make_request((CARD.vocab_size,)))

        assert raised.value.reason is Reason.INVALID_ARGUMENT
        assert bench.engine.submitted == []
        assert bench.execute.counters.refused == 0

    run_clocked(scenario())
