"""The runner: cancels cost little, the death of the engine is detected, and every shutdown is bounded."""

import asyncio
import dataclasses
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.runtime.tasks import leaf_of
from services.worker.engine import Output
from services.worker.engines.trtllm.health import CANARY, CANARY_TRIES
from tests.support.clock import WAIT_S
from tests.support.trtllm import PROMPT, WITHOUT_STATS, RunningEngine, llm_of, new_request, play

LONG = new_request(max_tokens=900)


def death(folder: Path, scenario: Any, **config: Any) -> Failure:
    """The failure that the engine's `run` raises."""
    with pytest.raises(ExceptionGroup) as caught:
        play(folder, scenario, **config)
    failure = leaf_of(caught.value)
    assert isinstance(failure, Failure), failure
    return failure


async def wait_forever(_: RunningEngine) -> None:
    await asyncio.Event().wait()


# Cancel


def test_cancelled_request_is_aborted_and_emits_nothing_more(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        engine = running.engine
        engine.submit(1, LONG)
        await running.until(lambda: len(running.token_ids(1)) > 5)
        engine.cancel(1)
        engine.cancel(1)
        seen = len(running.outputs(1))
        await running.until(lambda: not llm_of(running)._executor._dispatcher.results)

        assert len(running.outputs(1)) == seen
        assert running.end(1) is None
        assert 0 < engine.load().tokens_after_cancel < 50

    play(folder, scenario)


def test_request_cancelled_in_the_turn_of_its_submission_is_aborted(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, LONG)
        running.engine.cancel(1)
        running.engine.submit(2, new_request())
        await running.wait_end(2)
        runner: Any = running.engine._runner
        await running.until(lambda: not runner._leaving)

        assert not running.outputs(1)

    play(folder, scenario)


def test_aborted_request_without_a_last_result_is_removed_in_bounded_time(folder: Path) -> None:
    """The engine drops an aborted request from its queue without a last result."""

    async def scenario(running: RunningEngine) -> None:
        llm, runner = llm_of(running), running.engine._runner
        assert runner is not None
        filler = [llm.generate_async(inputs=[1], sampling_params=_long(), streaming=True) for _ in range(2)]
        running.engine.submit(1, LONG)  # Waits in the engine: other requests fill its batch.
        await asyncio.sleep(0.02)
        running.engine.cancel(1)
        assert len(runner._leaving) == 1
        await running.until(lambda: not runner._leaving)

        assert not running.outputs(1)
        for one in filler:
            one.abort()

    play(folder, scenario, max_batch_size=2, abort_s=0.1)


def _long() -> Any:
    return sys.modules["tensorrt_llm"].SamplingParams(max_tokens=900, end_id=256, ignore_eos=True, top_k=1)


def test_request_is_aborted_at_most_once_and_only_before_its_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine keeps state for every abort."""

    async def scenario(running: RunningEngine) -> list[int]:
        executor, aborted = llm_of(running)._executor, list[int]()
        monkeypatch.setattr(executor, "abort_request", aborted.append)
        await running.answer(1, new_request())
        running.engine.cancel(1)
        running.engine.submit(2, LONG)
        await running.until(lambda: running.token_ids(2))
        running.engine.cancel(2)
        running.engine.cancel(2)
        return list(aborted)  # A copy: at shutdown, the engine aborts all its requests.

    assert len(play(folder, scenario)) == 1


def test_aborted_request_is_not_aborted_again_at_shutdown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_CANCEL_STEPS", "1000")
    events: list[str] = []

    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, LONG)
        await running.until(lambda: running.token_ids(1))
        [result] = llm_of(running)._executor._dispatcher.results.values()
        _note_calls(monkeypatch, events, result, "abort")
        running.engine.cancel(1)

    play(folder, scenario, abort_s=5.0)

    assert events == ["abort"]


def test_buffered_output_of_a_cancelled_request_is_discarded(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, new_request(max_tokens=3).after([97, 98, 99]))  # Ends with the next step.
        running.engine.cancel(1)
        await running.answer(2, new_request())

        assert not running.outputs(1)

    play(folder, scenario)


def test_hundreds_of_cancels_leave_no_state_behind(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        runner: Any = running.engine._runner
        for number in range(0, 300, 10):
            for key in range(number, number + 10):
                running.engine.submit(key, LONG)
            for key in range(number, number + 10):
                await running.until(partial(running.token_ids, key))
            for key in range(number, number + 10):
                running.engine.cancel(key)
        await running.until(lambda: not runner._leaving and not llm_of(running)._executor._dispatcher.results)

        assert not runner._live
        assert (await running.answer(1000, new_request()))[1].finish is FinishReason.LENGTH

    play(folder, scenario)


def test_answer_that_ends_before_the_engines_last_result_is_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, if a later version ignores the stop ids together with ignore_eos."""

    async def scenario(running: RunningEngine) -> Output:
        llm, start = llm_of(running), llm_of(running).generate_async

        def forgetful(**given: Any) -> Any:
            given["sampling_params"].stop_token_ids = None
            return start(**given)

        uncut, _ = await running.answer(1, new_request())
        monkeypatch.setattr(llm, "generate_async", forgetful)
        token_ids, end = await running.answer(2, replace(LONG, stop=replace(LONG.stop, token_ids=(uncut[9],))))
        assert token_ids == uncut[: uncut.index(uncut[9])]
        await running.until(lambda: not llm._executor._dispatcher.results)
        assert running.engine.load().tokens_after_cancel == 0, "no request was cancelled"
        return end

    assert play(folder, scenario).finish is FinishReason.STOP


# Load


def test_load_reports_tokens_of_requests_and_totals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "20")

    async def scenario(running: RunningEngine) -> None:
        engine = running.engine
        steps = engine.load().steps
        engine.submit(1, new_request(max_tokens=8))
        [rank] = engine.load().ranks
        assert rank.active_prefill_tokens == len(PROMPT)
        await running.until(lambda: running.token_ids(1))
        assert engine.load().ranks[0].active_prefill_tokens == 0
        await running.wait_end(1)

        load = engine.load()
        assert load.steps >= steps + 8
        assert (load.generated_tokens, load.tokens_after_cancel) == (8, 0)
        assert load.prefill_tokens == len(PROMPT)
        assert load.ranks[0].kv_blocks_used == 0

    play(folder, scenario)


def test_prompt_tokens_found_in_the_cache_are_not_counted(folder: Path) -> None:
    request = replace(new_request(max_tokens=1), token_ids=tuple(range(100)))

    async def scenario(running: RunningEngine) -> list[int]:
        counts = []
        for key in (1, 2):
            before = running.engine.load().prefill_tokens
            await running.answer(key, request)
            counts.append(running.engine.load().prefill_tokens - before)
        return counts

    first, again = play(folder, scenario)

    assert first == 100
    assert 0 < again <= 100 - 96, "blocks of 32"


def test_silence_counts_from_the_first_request_after_an_idle_period(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first request after a pause would find the engine in doubt."""
    events: list[str] = []

    async def scenario(running: RunningEngine) -> None:
        runner: Any = running.engine._runner
        _note_calls(monkeypatch, events, runner._health, "note_request")
        running.engine.submit(1, new_request())
        running.engine.submit(2, new_request())
        await running.wait_end(1)
        await running.wait_end(2)
        assert events == ["note_request"]
        await running.answer(3, new_request())

    play(folder, scenario)

    assert events == ["note_request", "note_request"]


def test_attention_dp_sends_each_request_to_the_emptiest_rank_strictly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(running: RunningEngine) -> list[tuple[int, bool]]:
        llm, start, sent = llm_of(running), llm_of(running).generate_async, []

        def recorded(**given: Any) -> Any:
            scheduling = given["scheduling_params"]
            sent.append((scheduling.attention_dp_rank, scheduling.attention_dp_relax))
            return start(**given)

        monkeypatch.setattr(llm, "generate_async", recorded)
        for key in (1, 2, 3):
            running.engine.submit(key, LONG)
        assert [rank.active_prefill_tokens for rank in running.engine.load().ranks] == [2 * len(PROMPT), len(PROMPT)]
        assert [rank.dp_rank for rank in running.engine.load().ranks] == [0, 1]
        return sent

    config = {"tensor_parallel_size": 2, "extra": WITHOUT_STATS | {"enable_attention_dp": True}, "canary_after_s": 60.0}
    assert play(folder, scenario, **config) == [(0, False), (1, False), (0, False)]


# Death


@pytest.mark.parametrize("how", ["stored", "raised", "silent"])
def test_death_of_an_engine_with_requests_is_detected(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", "7")
    monkeypatch.setenv("TLLM_FAKE_DEATH", how)

    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, LONG)
        running.engine.submit(2, replace(LONG, token_ids=(7,)))
        await asyncio.Event().wait()

    failure = death(folder, scenario, probe_after_s=0.1, stall_s=0.3)

    assert failure.reason is Reason.ENGINE_DEAD


@pytest.mark.parametrize("how", ["stored", "silent"])
def test_death_of_an_idle_engine_is_detected(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own health check would report it as alive: it exists, and has not been shut down."""
    monkeypatch.setenv("TLLM_FAKE_DEATH_STEPS", "3")
    monkeypatch.setenv("TLLM_FAKE_DEATH", how)

    async def scenario(running: RunningEngine) -> None:
        await running.answer(1, new_request(max_tokens=1))
        await asyncio.Event().wait()

    assert death(folder, scenario, probe_after_s=0.1, canary_after_s=0.1, canary_s=0.3).reason is Reason.ENGINE_DEAD


def test_request_to_an_engine_that_has_shut_down_fails_with_engine_dead(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        llm_of(running).shutdown()
        for _ in range(2):
            with pytest.raises(Failure) as caught:
                running.engine.submit(1, new_request())
            assert caught.value.reason is Reason.ENGINE_DEAD
        await asyncio.Event().wait()

    assert "shutting down" in death(folder, scenario, canary_after_s=60.0).detail


def test_model_that_cannot_be_loaded_fails_with_a_clear_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_LOAD_ERROR", "out of memory")

    async def played() -> None:
        await asyncio.wait_for(for_ready(folder), WAIT_S)

    with pytest.raises(Failure, match=r"cannot load .*out of memory") as caught:
        asyncio.run(played())
    assert caught.value.reason is Reason.ENGINE_DEAD


def test_engine_that_cannot_make_a_token_never_becomes_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_STEPS", "1")

    with pytest.raises(Failure, match="cannot make a token"):
        asyncio.run(for_ready(folder))


async def for_ready(folder: Path, warm_up_s: float = 0.2) -> None:
    """Run an engine that dies before it is ready."""
    from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine

    ready = asyncio.Event()
    engine = TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m", shutdown_s=1.0, warm_up_s=warm_up_s))
    try:
        await engine.run(lambda _: None, ready)
    finally:
        assert not ready.is_set()


def test_engine_that_fails_its_first_request_never_becomes_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is not enough: this engine would fail all requests, faster than other workers serve them."""
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", str(CANARY.prompt_token_ids[0]))

    async def played() -> None:
        await asyncio.wait_for(for_ready(folder, warm_up_s=2 * WAIT_S), WAIT_S)

    with pytest.raises(Failure, match="cannot make a token: it failed 3 times"):
        asyncio.run(played())


def test_engine_that_fails_every_request_is_dead(folder: Path) -> None:
    """For example, after an illegal memory access on a GPU, each request gets an error and the engine continues."""

    async def scenario(running: RunningEngine) -> None:
        assert (await running.answer(1, new_request()))[1].finish is FinishReason.LENGTH
        engine = llm_of(running)._executor._engine
        engine._faults = dataclasses.replace(engine._faults, error_token=CANARY.prompt_token_ids[0])
        emitted.append(running)
        running.engine.submit(2, replace(LONG, token_ids=CANARY.token_ids))
        await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)

    emitted: list[RunningEngine] = []
    assert death(folder, scenario, canary_after_s=60.0).reason is Reason.ENGINE_DEAD
    assert emitted[0].end(2) is None, "the request must continue elsewhere after the engine's death"


def test_failure_of_one_request_is_emitted_with_the_next_token_of_the_engine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", "7")

    async def scenario(running: RunningEngine) -> Output:
        running.engine.submit(1, replace(new_request(), token_ids=(7,)))
        return await running.wait_end(1)  # The next token is the canary's, because no other request runs.

    end = play(folder, scenario, canary_after_s=60.0)
    assert end.failure is not None
    assert end.failure.reason is Reason.ENGINE_ERROR


def test_cancelled_request_does_not_emit_its_held_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", "7")

    async def scenario(running: RunningEngine) -> None:
        runner: Any = running.engine._runner
        monkeypatch.setattr(runner._health, "doubt", lambda: None)  # No canary, so no token.
        running.engine.submit(1, replace(new_request(), token_ids=(7,)))
        await running.until(lambda: runner._held_failures)
        running.engine.cancel(1)
        assert (await running.answer(2, new_request()))[1].finish is FinishReason.LENGTH
        assert running.end(1) is None

    play(folder, scenario, canary_after_s=60.0)


def test_engine_lives_if_the_canary_succeeds_at_its_last_try(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary may have been in the same step as the request that caused the error."""

    async def scenario(running: RunningEngine) -> FinishReason | None:
        engine = llm_of(running)._executor._engine
        faults = engine._faults
        engine._faults = dataclasses.replace(faults, error_token=CANARY.prompt_token_ids[0])
        runner: Any = running.engine._runner
        start, starts = runner._client.start, []

        def recorded(*given: Any) -> Any:
            starts.append(given)
            if len(starts) == CANARY_TRIES:
                engine._faults = faults
            return start(*given)

        monkeypatch.setattr(runner._client, "start", recorded)
        runner._health.doubt()
        await running.until(lambda: len(starts) == CANARY_TRIES)
        return (await running.answer(1, new_request()))[1].finish

    assert play(folder, scenario, canary_after_s=60.0) is FinishReason.LENGTH


def test_request_without_results_while_others_continue_fails_and_is_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.engines.trtllm.runner.SILENCE_CHECK_S", 0.02)
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "2")

    async def scenario(running: RunningEngine) -> Output:
        running.engine.submit(1, LONG)
        running.engine.submit(2, LONG)
        await running.until(lambda: running.token_ids(1))
        results = llm_of(running)._executor._dispatcher.results
        lost = next(result for result in results.values() if len(result.outputs[0].token_ids))
        del results[lost.request_id]  # Like a lost response.
        await running.until(lambda: running.end(1) or running.end(2))
        failed, other = (1, 2) if running.end(1) else (2, 1)
        count = len(running.token_ids(other))
        await running.until(lambda: len(running.token_ids(other)) > count)
        end = running.end(failed)
        assert end is not None
        return end

    end = play(folder, scenario, silence_s=0.4)
    assert end.failure is not None
    assert end.failure.reason is Reason.ENGINE_ERROR


# End


@pytest.fixture
def hanging_shutdown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TLLM_FAKE_SHUTDOWN", "hangs")
    yield
    sys.modules["tensorrt_llm._fake.faults"].RELEASE.set()  # Ends its thread with the test.


def test_run_ends_in_bounded_time_even_if_the_engine_hangs(folder: Path, hanging_shutdown: None) -> None:
    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, LONG)
        await running.until(lambda: running.token_ids(1))

    play(folder, scenario, shutdown_s=0.1)

    assert any(thread.name == "trtllm-shutdown" for thread in threading.enumerate())


def test_shutdown_of_a_dead_engine_is_not_waited_for(
    folder: Path, hanging_shutdown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", "7")
    monkeypatch.setenv("TLLM_FAKE_DEATH", "silent")

    async def scenario(running: RunningEngine) -> None:
        running.engine.submit(1, replace(LONG, token_ids=(7,)))
        await asyncio.Event().wait()

    assert death(folder, scenario, probe_after_s=0.1, stall_s=0.2, shutdown_s=60.0).reason is Reason.ENGINE_DEAD


def test_requests_are_aborted_before_the_engine_is_shut_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def scenario(running: RunningEngine) -> None:
        llm = llm_of(running)
        running.engine.submit(1, LONG)
        await running.until(lambda: running.token_ids(1))
        [result] = llm._executor._dispatcher.results.values()
        _note_calls(monkeypatch, events, result, "abort")
        _note_calls(monkeypatch, events, llm, "shutdown")

    play(folder, scenario)

    assert events == ["abort", "shutdown"]


def _note_calls(monkeypatch: pytest.MonkeyPatch, events: list[str], owner: Any, name: str) -> None:
    function = getattr(owner, name)

    def noted() -> None:
        events.append(name)
        function()

    monkeypatch.setattr(owner, name, noted)
