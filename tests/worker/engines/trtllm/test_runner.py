"""The engine's life: cancels that cost little, deaths that are noticed, and an end that does not wait for ever."""

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
from services.worker.engines.trtllm.runner import CANARY, CANARY_TRIES
from tests.support.doubles import TEST_S_MAX
from tests.worker.engines.trtllm.support import PROMPT, WITHOUT_STATS, Running, asked, llm_of, play

LONG = asked(max_tokens=900)


def death(folder: Path, scenario: Any, **config: Any) -> Failure:
    """What the engine's `run` raises."""
    with pytest.raises(ExceptionGroup) as caught:
        play(folder, scenario, **config)
    failure = leaf_of(caught.value)
    assert isinstance(failure, Failure), failure
    return failure


async def for_ever(_: Running) -> None:
    await asyncio.Event().wait()


# Cancel


def test_a_cancelled_request_is_aborted_and_nothing_of_it_is_emitted_any_more(folder: Path) -> None:
    async def scenario(running: Running) -> None:
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


def test_a_request_that_is_cancelled_in_the_turn_it_came_is_aborted_too(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        running.engine.submit(1, LONG)
        running.engine.cancel(1)
        running.engine.submit(2, asked())
        await running.wait_end(2)
        serving: Any = running.engine._serving
        await running.until(lambda: not serving._leaving)

        assert not running.outputs(1)

    play(folder, scenario)


def test_one_of_which_nothing_is_heard_after_its_abort_is_forgotten_in_bounded_time(folder: Path) -> None:
    """The engine drops a request from its queue without a word to whoever waits for it."""

    async def scenario(running: Running) -> None:
        llm, serving = llm_of(running), running.engine._serving
        assert serving is not None
        filler = [llm.generate_async(inputs=[1], sampling_params=_long(), streaming=True) for _ in range(2)]
        running.engine.submit(1, LONG)  # Waits in the engine: its batch is full of what is not ours.
        await asyncio.sleep(0.02)
        running.engine.cancel(1)
        assert len(serving._leaving) == 1
        await running.until(lambda: not serving._leaving)

        assert not running.outputs(1)
        for one in filler:
            one.abort()

    play(folder, scenario, max_batch_size=2, abort_s=0.1)


def _long() -> Any:
    return sys.modules["tensorrt_llm"].SamplingParams(max_tokens=900, end_id=256, ignore_eos=True, top_k=1)


def test_a_request_is_aborted_once_and_only_if_it_has_not_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was aborted the engine remembers."""

    async def scenario(running: Running) -> list[int]:
        executor, aborted = llm_of(running)._executor, list[int]()
        monkeypatch.setattr(executor, "abort_request", aborted.append)
        await running.answer(1, asked())
        running.engine.cancel(1)
        running.engine.submit(2, LONG)
        await running.until(lambda: running.token_ids(2))
        running.engine.cancel(2)
        running.engine.cancel(2)
        return list(aborted)  # At its own end the engine aborts all that it knows.

    assert len(play(folder, scenario)) == 1


def test_one_that_is_waited_for_after_its_abort_is_not_aborted_again_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_CANCEL_STEPS", "1000")
    events: list[str] = []

    async def scenario(running: Running) -> None:
        running.engine.submit(1, LONG)
        await running.until(lambda: running.token_ids(1))
        [result] = llm_of(running)._executor._dispatcher.results.values()
        _note_calls(monkeypatch, events, result, "abort")
        running.engine.cancel(1)

    play(folder, scenario, abort_s=5.0)

    assert events == ["abort"]


def test_what_has_been_gathered_of_a_request_is_not_emitted_once_it_is_cancelled(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        running.engine.submit(1, asked(max_tokens=3).after([97, 98, 99]))  # Ends with the next step.
        running.engine.cancel(1)
        await running.answer(2, asked())

        assert not running.outputs(1)

    play(folder, scenario)


def test_hundreds_of_cancels_leave_nothing_behind(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        serving: Any = running.engine._serving
        for number in range(0, 300, 10):
            for key in range(number, number + 10):
                running.engine.submit(key, LONG)
            for key in range(number, number + 10):
                await running.until(partial(running.token_ids, key))
            for key in range(number, number + 10):
                running.engine.cancel(key)
        await running.until(lambda: not serving._leaving and not llm_of(running)._executor._dispatcher.results)

        assert not serving._live
        assert (await running.answer(1000, asked()))[1].finish is FinishReason.LENGTH

    play(folder, scenario)


def test_an_answer_that_ends_before_the_engine_knows_is_aborted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a later version leaves the stop ids out under ignore_eos."""

    async def scenario(running: Running) -> Output:
        llm, start = llm_of(running), llm_of(running).generate_async

        def forgetful(**given: Any) -> Any:
            given["sampling_params"].stop_token_ids = None
            return start(**given)

        uncut, _ = await running.answer(1, asked())
        monkeypatch.setattr(llm, "generate_async", forgetful)
        token_ids, end = await running.answer(2, replace(LONG, stop=replace(LONG.stop, token_ids=(uncut[9],))))
        assert token_ids == uncut[: uncut.index(uncut[9])]
        await running.until(lambda: not llm._executor._dispatcher.results)
        assert running.engine.load().tokens_after_cancel == 0, "nobody cancelled"
        return end

    assert play(folder, scenario).finish is FinishReason.STOP


# Load


def test_it_reports_what_its_requests_hold_and_what_it_did(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "20")

    async def scenario(running: Running) -> None:
        engine = running.engine
        steps = engine.load().steps
        engine.submit(1, asked(max_tokens=8))
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


def test_what_the_engine_had_computed_before_is_not_counted_again(folder: Path) -> None:
    request = replace(asked(max_tokens=1), token_ids=tuple(range(100)))

    async def scenario(running: Running) -> list[int]:
        counts = []
        for key in (1, 2):
            before = running.engine.load().prefill_tokens
            await running.answer(key, request)
            counts.append(running.engine.load().prefill_tokens - before)
        return counts

    first, again = play(folder, scenario)

    assert first == 100
    assert 0 < again <= 100 - 96, "blocks of 32"


def test_the_wait_for_news_begins_with_the_first_request_after_a_time_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever comes after a pause would find the engine under suspicion."""
    events: list[str] = []

    async def scenario(running: Running) -> None:
        serving: Any = running.engine._serving
        _note_calls(monkeypatch, events, serving._health, "asked")
        running.engine.submit(1, asked())
        running.engine.submit(2, asked())
        await running.wait_end(1)
        await running.wait_end(2)
        assert events == ["asked"]
        await running.answer(3, asked())

    play(folder, scenario)

    assert events == ["asked", "asked"]


def test_with_attention_dp_each_request_is_sent_to_a_rank_of_its_own_and_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(running: Running) -> list[tuple[int, bool]]:
        llm, start, sent = llm_of(running), llm_of(running).generate_async, []

        def look(**given: Any) -> Any:
            scheduling = given["scheduling_params"]
            sent.append((scheduling.attention_dp_rank, scheduling.attention_dp_relax))
            return start(**given)

        monkeypatch.setattr(llm, "generate_async", look)
        for key in (1, 2, 3):
            running.engine.submit(key, LONG)
        assert [rank.active_prefill_tokens for rank in running.engine.load().ranks] == [2 * len(PROMPT), len(PROMPT)]
        assert [rank.dp_rank for rank in running.engine.load().ranks] == [0, 1]
        return sent

    config = {"tensor_parallel_size": 2, "extra": WITHOUT_STATS | {"enable_attention_dp": True}, "canary_after_s": 60.0}
    assert play(folder, scenario, **config) == [(0, False), (1, False), (0, False)]


# Death


@pytest.mark.parametrize("how", ["stored", "raised", "silent"])
def test_an_engine_that_dies_under_its_requests_is_noticed(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", "7")
    monkeypatch.setenv("TLLM_FAKE_DEATH", how)

    async def scenario(running: Running) -> None:
        running.engine.submit(1, LONG)
        running.engine.submit(2, replace(LONG, token_ids=(7,)))
        await asyncio.Event().wait()

    failure = death(folder, scenario, probe_after_s=0.1, stall_s=0.3)

    assert failure.reason is Reason.ENGINE_DEAD


@pytest.mark.parametrize("how", ["stored", "silent"])
def test_an_engine_that_dies_while_it_is_idle_is_noticed(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its health alone it lives for ever: it is there, and has not been shut down."""
    monkeypatch.setenv("TLLM_FAKE_DEATH_STEPS", "3")
    monkeypatch.setenv("TLLM_FAKE_DEATH", how)

    async def scenario(running: Running) -> None:
        await running.answer(1, asked(max_tokens=1))
        await asyncio.Event().wait()

    assert death(folder, scenario, probe_after_s=0.1, canary_after_s=0.1, canary_s=0.3).reason is Reason.ENGINE_DEAD


def test_a_request_to_an_engine_that_has_shut_down_is_the_engines_death(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        llm_of(running).shutdown()
        for _ in range(2):
            with pytest.raises(Failure) as caught:
                running.engine.submit(1, asked())
            assert caught.value.reason is Reason.ENGINE_DEAD
        await asyncio.Event().wait()

    assert "shutting down" in death(folder, scenario, canary_after_s=60.0).detail


def test_a_model_that_cannot_be_loaded_ends_it_with_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_LOAD_ERROR", "out of memory")

    async def played() -> None:
        await asyncio.wait_for(for_ready(folder), 5)

    with pytest.raises(Failure, match=r"cannot load .*out of memory") as caught:
        asyncio.run(played())
    assert caught.value.reason is Reason.ENGINE_DEAD


def test_an_engine_that_cannot_make_a_token_never_becomes_ready(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_STEPS", "1")

    with pytest.raises(Failure, match="cannot make a token"):
        asyncio.run(for_ready(folder))


async def for_ready(folder: Path, warm_up_s: float = 0.2) -> None:
    """Run an engine to its death, before it has become ready."""
    from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine

    ready = asyncio.Event()
    engine = TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m", shutdown_s=1.0, warm_up_s=warm_up_s))
    try:
        await engine.run(lambda _: None, ready)
    finally:
        assert not ready.is_set()


def test_an_engine_that_fails_its_first_request_never_becomes_ready(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is not enough: it would fail all requests, faster than any other worker serves them."""
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", str(CANARY.prompt_token_ids[0]))

    async def played() -> None:
        await asyncio.wait_for(for_ready(folder, warm_up_s=2 * TEST_S_MAX), TEST_S_MAX)

    with pytest.raises(Failure, match="cannot make a token: it failed 3 times"):
        asyncio.run(played())


def test_an_engine_that_fails_whatever_it_is_asked_is_dead(folder: Path) -> None:
    """As after an illegal access to the memory of a GPU: each request gets its error, and the engine goes on."""

    async def scenario(running: Running) -> None:
        assert (await running.answer(1, asked()))[1].finish is FinishReason.LENGTH
        engine = llm_of(running)._executor._engine
        engine._faults = dataclasses.replace(engine._faults, error_token=CANARY.prompt_token_ids[0])
        emitted.append(running)
        running.engine.submit(2, replace(LONG, token_ids=CANARY.token_ids))
        await asyncio.wait_for(asyncio.Event().wait(), 5)

    emitted: list[Running] = []
    assert death(folder, scenario, canary_after_s=60.0).reason is Reason.ENGINE_DEAD
    assert emitted[0].end(2) is None, "with the engine's own death it goes on elsewhere"


def test_a_request_that_failed_alone_is_told_so_with_the_next_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", "7")

    async def scenario(running: Running) -> Output:
        running.engine.submit(1, replace(asked(), token_ids=(7,)))
        return await running.wait_end(1)  # The next token is the canary's: nothing else runs.

    end = play(folder, scenario, canary_after_s=60.0)
    assert end.failure is not None
    assert end.failure.reason is Reason.ENGINE_ERROR


def test_one_that_failed_and_is_cancelled_meanwhile_is_told_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", "7")

    async def scenario(running: Running) -> None:
        serving: Any = running.engine._serving
        monkeypatch.setattr(serving._health, "doubt", lambda: None)  # So no canary's token comes.
        running.engine.submit(1, replace(asked(), token_ids=(7,)))
        await running.until(lambda: serving._failed)
        running.engine.cancel(1)
        assert (await running.answer(2, asked()))[1].finish is FinishReason.LENGTH
        assert running.end(1) is None

    play(folder, scenario, canary_after_s=60.0)


def test_an_error_that_is_not_the_engines_is_no_death(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary may have been in the same step as what caused it."""

    async def scenario(running: Running) -> FinishReason | None:
        engine = llm_of(running)._executor._engine
        faults = engine._faults
        engine._faults = dataclasses.replace(faults, error_token=CANARY.prompt_token_ids[0])
        serving: Any = running.engine._serving
        start, starts = serving._client.start, []

        def look(*given: Any) -> Any:
            starts.append(given)
            if len(starts) == CANARY_TRIES:
                engine._faults = faults
            return start(*given)

        monkeypatch.setattr(serving._client, "start", look)
        serving._health.doubt()
        await running.until(lambda: len(starts) == CANARY_TRIES)
        return (await running.answer(1, asked()))[1].finish

    assert play(folder, scenario, canary_after_s=60.0) is FinishReason.LENGTH


def test_a_request_of_which_nothing_is_heard_while_others_go_on_fails_and_is_aborted(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.engines.trtllm.runner.LOOK_S", 0.02)
    monkeypatch.setenv("TLLM_FAKE_STEP_MS", "2")

    async def scenario(running: Running) -> Output:
        running.engine.submit(1, LONG)
        running.engine.submit(2, LONG)
        await running.until(lambda: running.token_ids(1))
        results = llm_of(running)._executor._dispatcher.results
        lost = next(result for result in results.values() if len(result.outputs[0].token_ids))
        del results[lost.request_id]  # As a response that nobody is found for.
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
    sys.modules["tensorrt_llm._fake.faults"].RELEASE.set()  # Else its thread would outlive the test.


def test_it_ends_in_bounded_time_even_if_the_engine_does_not(folder: Path, hanging_shutdown: None) -> None:
    async def scenario(running: Running) -> None:
        running.engine.submit(1, LONG)
        await running.until(lambda: running.token_ids(1))

    play(folder, scenario, shutdown_s=0.1)

    assert any(thread.name == "trtllm-shutdown" for thread in threading.enumerate())


def test_a_dead_engine_is_not_waited_for_because_streams_wait_to_go_on_elsewhere(
    folder: Path, hanging_shutdown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", "7")
    monkeypatch.setenv("TLLM_FAKE_DEATH", "silent")

    async def scenario(running: Running) -> None:
        running.engine.submit(1, replace(LONG, token_ids=(7,)))
        await asyncio.Event().wait()

    assert death(folder, scenario, probe_after_s=0.1, stall_s=0.2, shutdown_s=60.0).reason is Reason.ENGINE_DEAD


def test_requests_are_aborted_before_the_engine_is_shut_down(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    async def scenario(running: Running) -> None:
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
