"""Early ends in the fake: aborts, failures of one request and of the engine, and shutdown."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.support import PROMPT, answer, engine, is_silent, start
from tests.fakes.tensorrt_llm._fake.faults import RELEASE, Faults
from tests.fakes.tensorrt_llm.executor.utils import CppExecutorError
from tests.fakes.tensorrt_llm.llmapi import RequestError
from tests.support.doubles import run_async
from tests.support.environments import ROOT

LONG = 1500
MARKER = 1


def test_abort_takes_effect_some_steps_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_CANCEL_STEPS", "3")

    async def play(llm: Any) -> None:
        result = start(llm, max_tokens=LONG)
        await anext(result)
        result.abort()
        lengths = [len(item.outputs[0].token_ids) async for item in result]

        assert result.finished
        assert result.outputs[0].finish_reason == "cancelled"
        assert len(lengths) >= 3

    with engine() as llm:
        run_async(play(llm))


def test_abort_takes_effect_in_the_middle_of_a_long_prompt() -> None:
    """Each step computes a chunk: those in progress are completed, and no further one is started."""

    async def play(llm: Any) -> None:
        result = start(llm, [*b"ab"] * LONG, max_tokens=1)
        await answer(llm, max_tokens=2)
        result.abort()
        await result

        assert result.outputs[0].finish_reason == "cancelled"
        assert result.decoding_iter < 100

    with engine(max_num_tokens=10, max_seq_len=2 * LONG + 1, enable_chunked_prefill=True) as llm:
        run_async(play(llm))


def test_work_file_has_the_numbers_of_computed_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TLLM_FAKE_WORK_FILE", str(tmp_path / "work"))

    async def play(llm: Any) -> None:
        await answer(llm, [*b"abc"], max_tokens=2)
        assert (tmp_path / "work").read_text() == "tllm_fake_prompt_tokens 3\ntllm_fake_answer_tokens 2\n"
        await answer(llm, [*b"defg"], max_tokens=8)
        assert (tmp_path / "work").read_text() == "tllm_fake_prompt_tokens 7\ntllm_fake_answer_tokens 10\n"

    with engine() as llm:
        run_async(play(llm))


def test_request_aborted_while_waiting_never_gets_a_response() -> None:
    async def play(llm: Any) -> None:
        running, waiting = start(llm, max_tokens=20), start(llm, max_tokens=2)
        waiting.abort()
        await running
        await answer(llm, max_tokens=2)

        assert await is_silent(waiting)
        assert not waiting.finished

    with engine(max_batch_size=1) as llm:
        run_async(play(llm))


def test_abort_after_the_end_has_no_effect() -> None:
    async def play(llm: Any) -> None:
        result = await start(llm, max_tokens=2)
        result.abort()
        result.abort()

        assert len(await answer(llm, max_tokens=3)) == 3

    with engine() as llm:
        run_async(play(llm))


def test_engine_continues_a_request_that_is_no_longer_read() -> None:
    async def play(llm: Any) -> None:
        left = start(llm, max_tokens=40)
        async for _ in left:
            break
        await answer(llm, max_tokens=60)

        assert len((await left).outputs[0].token_ids) == 40

    with engine() as llm:
        run_async(play(llm))


def test_failed_request_is_not_finished_and_gets_no_more_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_ERROR_TOKEN", str(MARKER))
    monkeypatch.setenv("TLLM_FAKE_ERROR_AFTER", "2")

    async def play(llm: Any) -> None:
        failing, other = start(llm, [MARKER, *PROMPT], max_tokens=9), start(llm, max_tokens=9)
        with pytest.raises(RequestError):
            await failing

        assert len(failing.outputs[0].token_ids) == 2
        assert not failing.finished
        assert await is_silent(failing)
        assert len((await other).outputs[0].token_ids) == 9

    with engine() as llm:
        run_async(play(llm))


def test_responses_of_one_request_may_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_LOST_TOKEN", str(MARKER))
    monkeypatch.setenv("TLLM_FAKE_LOST_AFTER", "2")

    async def play(llm: Any) -> None:
        lost = start(llm, [MARKER, *PROMPT], max_tokens=9)
        await anext(lost)
        await anext(lost)
        await answer(llm, max_tokens=20)

        assert await is_silent(lost)

    with engine() as llm:
        run_async(play(llm))


def test_dead_engine_leaves_requests_hanging_and_fails_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised once, by a call that first shuts the engine down."""
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", str(MARKER))

    async def play(llm: Any) -> None:
        running = start(llm, max_tokens=LONG)
        await anext(running)
        start(llm, [MARKER])
        while llm._executor._dispatcher.errors.empty():
            await asyncio.sleep(0)

        with pytest.raises(CppExecutorError):
            start(llm)
        with pytest.raises(RuntimeError, match="LLM is shutting down"):
            start(llm)
        while not await is_silent(running):
            pass  # Tokens drawn before.

    with engine() as llm:
        run_async(play(llm))


def test_error_of_a_dead_engine_may_be_raised_by_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", str(MARKER))
    monkeypatch.setenv("TLLM_FAKE_DEATH", "raised")

    async def play(llm: Any) -> None:
        running = start(llm, max_tokens=LONG)
        await anext(running)
        start(llm, [MARKER])

        with pytest.raises(CppExecutorError):
            await running
        assert not running.finished

    with engine() as llm:
        run_async(play(llm))


def test_engine_may_die_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_DEATH_TOKEN", str(MARKER))
    monkeypatch.setenv("TLLM_FAKE_DEATH", "silent")

    async def play(llm: Any) -> None:
        assert await is_silent(start(llm, [MARKER]))
        assert await is_silent(start(llm))

    with engine() as llm:
        run_async(play(llm))


def test_shutdown_cancels_running_requests() -> None:
    async def play(llm: Any) -> None:
        running = start(llm, max_tokens=LONG)
        await anext(running)
        llm.shutdown()
        await running

        assert running.outputs[0].finish_reason == "cancelled"
        with pytest.raises(AttributeError):
            running.abort()
        llm.shutdown()

    with engine() as llm:
        run_async(play(llm))


def test_shutdown_may_never_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_SHUTDOWN", "hangs")

    with engine() as llm:
        thread = threading.Thread(target=llm.shutdown)
        thread.start()
        thread.join(timeout=0.1)
        is_hanging = thread.is_alive()
        RELEASE.set()
        thread.join()
        RELEASE.clear()

    assert is_hanging


def test_process_may_hang_in_its_exit_handlers() -> None:
    code = "from tests.fakes.tensorrt_llm import LLM; llm = LLM('bytes'); print('end', flush=True)"
    environment = os.environ | {"TLLM_FAKE_SHUTDOWN": "hangs", "PYTHONPATH": str(ROOT)}

    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "end\n"
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.3)
        finally:
            process.kill()


def test_constructor_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_LOAD_ERROR", "no such weights")

    with pytest.raises(RuntimeError, match="no such weights"), engine():
        pass


def test_unknown_variable_is_refused() -> None:
    with pytest.raises(ValueError, match="TLLM_FAKE_STEPS_MS"):
        Faults.from_environment({"TLLM_FAKE_STEPS_MS": "1"})
