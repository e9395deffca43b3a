"""Migrate: builds the migration of each request and bounds what is recorded."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Reason
from services.core.interface import Finish, Sink
from services.core.request import FinishReason, Request
from services.frontend.layers.migrate import Migrate, MigrateConfig
from tests.frontend.migration.support import ABLE, Case, RecordedMetrics, Stage
from tests.support.doubles import HANG, Collected, Script, call_layer, make_request, run_async


def test_an_answer_without_a_failure_passes_through_unchanged() -> None:
    case = Case([7, 8, FinishReason.STOP])

    result = case.run()

    assert result.token_ids == [7, 8]
    assert result.finish == Finish(FinishReason.STOP)
    assert case.metrics.moves == []


@pytest.mark.parametrize(("seq_len_max", "moves"), [(4, True), (3, False)])
def test_a_request_moves_up_to_seq_len_max_tokens_and_not_above(seq_len_max: int, moves: bool) -> None:
    case = Case([7, 8, Reason.DISCONNECTED], [9], seq_len_max=seq_len_max)
    request = make_request(prompt=(1, 2))

    if moves:
        assert case.run(request).token_ids == [7, 8, 9]
    else:
        assert case.fails(request).reason is Reason.DISCONNECTED
    assert case.metrics.exceeded == 1  # The last token exceeds the limit in either case.


def test_a_prompt_above_seq_len_max_is_never_recorded_and_its_answer_does_not_move() -> None:
    begun = Case([7, Reason.DISCONNECTED], [8], seq_len_max=1)
    new = Case([Reason.DISCONNECTED], [7], seq_len_max=1)

    assert begun.fails(make_request(prompt=(1, 2))).reason is Reason.DISCONNECTED
    assert begun.metrics.exceeded == 1
    assert new.run(make_request(prompt=(1, 2))).token_ids == [7]  # Without tokens there is nothing to record.


def test_a_request_without_a_failure_starts_no_task() -> None:
    async def scenario() -> set[asyncio.Task[Any]]:
        script = Script([HANG])
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(call_layer(Migrate(script, MigrateConfig(), RecordedMetrics()), make_request()))
            await script.hanging.wait()
            others = asyncio.all_tasks() - {asking}
            asking.cancel()
        return others

    assert len(run_async(scenario())) == 1, "the only other task is the test's"


@pytest.fixture
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_request_without_a_failure_leaves_no_reference_cycle() -> None:
    """A cycle would keep the request's objects until the next garbage collection."""

    async def scenario() -> weakref.ref[Collected]:
        collected = Collected()
        layer = Migrate(Forgetful([7, 8]), MigrateConfig(), RecordedMetrics())
        await layer(make_request(), Call(request_id="r", card=ABLE), collected)
        return weakref.ref(collected)

    assert run_async(scenario())() is None


@pytest.mark.usefixtures("_no_garbage_collection")
def test_a_planned_move_leaves_no_reference_cycle() -> None:
    async def scenario() -> weakref.ref[Collected]:
        collected, stage = Collected(), Stage()
        layer = Migrate(stage, MigrateConfig(), stage.metrics)
        running = asyncio.ensure_future(layer(make_request(), Call(request_id="r", card=ABLE), collected))
        source = await stage.attempt(0)
        source.leave()
        target = await stage.attempt(1)
        target.deliver(7)
        target.finish()
        await running
        stage.attempts.clear()
        return weakref.ref(collected)

    assert run_async(scenario())() is None


class Forgetful(Script):
    """Keeps no reference to its calls."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        try:
            return await super().__call__(request, call, sink)
        finally:
            self.calls.clear()
