"""The mocker's step loop: one token for each sequence in a step, chunked prefill, and timing."""

import asyncio

from services.models.tokenizers.byte_level import ByteTokenizer
from services.worker.engines.mocker import MockerConfig, MockerEngine
from tests.support.doubles import make_request, run_async
from tests.worker.engines.support import RunningEngine, new_request, run


def test_step_gives_every_running_sequence_one_token() -> None:
    async def scenario(running: RunningEngine) -> list[list[int]]:
        await running.until(lambda: len(running.steps) == 3)
        return [[output.key for output in step] for step in running.steps[:3]]

    assert run(scenario, new_request(), new_request()) == [[1, 2]] * 3


def test_engine_continues_after_its_last_sequence_was_cancelled() -> None:
    async def scenario(running: RunningEngine) -> int:
        await running.until(lambda: running.token_ids(1))
        running.engine.cancel(1)
        running.engine.submit(2, new_request())
        await running.until(lambda: running.end(2))
        return len(running.token_ids(2))

    assert run(scenario, new_request()) == 64


def test_long_prompt_is_computed_in_chunks_while_others_continue() -> None:
    async def scenario(running: RunningEngine) -> int:
        running.engine.submit(2, new_request())
        await running.until(lambda: running.token_ids(2))
        running.engine.submit(3, make_request((1,) * 100, max_tokens=1))
        before = len(running.token_ids(2))
        await running.until(lambda: running.end(3))
        return len(running.token_ids(2)) - before

    # 100 tokens in chunks of 10 take ten steps; one more may have been in progress.
    assert run(scenario, prefill_chunk_tokens=10) in (10, 11)


def test_prefill_time_of_a_one_chunk_prompt_is_spent() -> None:
    async def scenario(running: RunningEngine) -> float:
        began = asyncio.get_running_loop().time()
        await running.until(lambda: running.token_ids(1))
        return asyncio.get_running_loop().time() - began

    assert run(scenario, make_request((1,) * 50), prefill_us_per_token=1000) >= 0.05


def test_tokens_are_spaced_by_itl() -> None:
    async def scenario(running: RunningEngine) -> float:
        began = asyncio.get_running_loop().time()
        await running.until(lambda: len(running.token_ids(1)) == 10)
        return asyncio.get_running_loop().time() - began

    assert run(scenario, new_request(), itl_ms=5.0) >= 0.049


def test_ready_is_set_after_the_startup_time() -> None:
    async def scenario() -> float:
        ready, clock = asyncio.Event(), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            began = clock()
            engine = group.create_task(MockerEngine(MockerConfig(startup_s=0.05)).run(lambda _: None, ready))
            await ready.wait()
            engine.cancel()
            return clock() - began

    assert run_async(scenario()) >= 0.05


def test_card_describes_the_byte_tokenizer() -> None:
    engine = MockerEngine(MockerConfig(served_model_name="m"))

    assert (engine.card.model, engine.card.vocab_size) == ("m", len(ByteTokenizer.token_bytes))
    assert engine.tokenizer_content() == b""
