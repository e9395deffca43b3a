"""Health checks: only a result proves that the engine lives; without one it counts as dead in bounded time."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.worker.engines.trtllm.health import LOOKS, Health
from services.worker.engines.trtllm.options import TrtLlmConfig
from tests.support.clock import pass_time, run_clocked, settle

CONFIG = TrtLlmConfig(
    model=Path("m"), served_model_name="m", canary_after_s=5.0, canary_s=20.0, probe_after_s=1.0, stall_s=60.0
)


class Engine:
    """An engine that is asked for tokens; the test completes each one. `is_busy`: whether it has requests."""

    def __init__(self, *, is_busy: bool = False) -> None:
        self.questions: list[asyncio.Future[None]] = []
        self.health = Health(CONFIG, self._ask, lambda: is_busy)

    async def _ask(self) -> None:
        self.questions.append(asyncio.get_running_loop().create_future())
        await self.questions[-1]


def play(scenario: Callable[[Engine, asyncio.Task[None]], Any], *, is_busy: bool = False) -> Any:
    """Play the scenario with an engine and the task that watches it."""

    async def played() -> Any:
        engine = Engine(is_busy=is_busy)
        watch = asyncio.create_task(engine.health.watch())
        await settle()
        result = await scenario(engine, watch)
        watch.cancel()
        return result

    return run_clocked(played())


async def later(seconds: float) -> None:
    pass_time(seconds)
    await settle()


async def idle_for(seconds: int) -> None:
    """Pass the time in steps of one second, the interval of the watch."""
    for _ in range(seconds):
        await later(1.0)


def test_engine_that_sends_results_regularly_is_not_asked_for_a_token() -> None:
    async def scenario(engine: Engine, _: Any) -> int:
        for _step in range(10):
            await idle_for(4)
            engine.health.note_result()
        return len(engine.questions)

    assert play(scenario) == 0


def test_silent_engine_is_asked_for_a_token_and_lives_if_it_makes_one() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> tuple[int, bool]:
        await idle_for(5)
        engine.questions[0].set_result(None)
        engine.health.note_result()
        await idle_for(4)
        return len(engine.questions), watch.done()

    assert play(scenario) == (1, False)


def test_engine_in_doubt_is_asked_for_a_token_at_once() -> None:
    async def scenario(engine: Engine, _: Any) -> int:
        engine.health.doubt()
        await settle()
        engine.questions[0].set_result(None)
        engine.health.note_result()
        await settle()
        return len(engine.questions)

    assert play(scenario) == 1


def death(watch: asyncio.Task[None]) -> BaseException | None:
    return watch.exception() if watch.done() else None


@pytest.mark.parametrize(("is_busy", "after_s", "limit_s"), [(False, 5.0, 20.0), (True, 1.0, 60.0)])
def test_engine_that_makes_no_token_in_time_is_dead(is_busy: bool, after_s: float, limit_s: float) -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> None:
        await idle_for(round(after_s) - 1)
        assert not engine.questions
        await later(1.0)
        for _ in range(LOOKS - 1):
            await later(limit_s / LOOKS)
        await later(limit_s / LOOKS - 0.1)
        assert death(watch) is None
        await later(0.2)

        died = death(watch)
        assert isinstance(died, Failure)
        assert died.reason is Reason.ENGINE_DEAD

    play(scenario, is_busy=is_busy)


@pytest.mark.parametrize("is_busy", [False, True])
def test_engine_is_not_dead_because_the_worker_itself_stood_still(is_busy: bool) -> None:
    """A bug: a worker that was suspended for a minute ended, although the token of its engine was there already."""

    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> BaseException | None:
        await idle_for(5)
        await later(3600.0)
        engine.questions[0].set_result(None)
        engine.health.note_result()
        await settle()
        return death(watch)

    assert play(scenario, is_busy=is_busy) is None


def test_result_of_any_request_proves_that_the_engine_lives() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> BaseException | None:
        await later(1.0)
        await later(30.0)
        engine.health.note_result()
        await later(31.0)
        return death(watch)

    assert play(scenario, is_busy=True) is None


def test_error_of_a_dead_engine_is_raised_unchanged() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> BaseException | None:
        await idle_for(5)
        engine.questions[0].set_exception(RuntimeError("LLM is shutting down"))
        await settle()
        return death(watch)

    assert str(play(scenario)) == "LLM is shutting down"


def test_idle_engine_with_a_new_request_gets_the_full_time_to_answer() -> None:
    async def scenario(engine: Engine, _: Any) -> list[int]:
        await later(0.9)
        engine.health.note_request()
        counts = []
        for _step in range(2):
            await later(0.5)
            counts.append(len(engine.questions))
        await later(0.1)
        return [*counts, len(engine.questions)]

    assert play(scenario, is_busy=True) == [0, 1, 1]
