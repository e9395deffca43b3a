"""The fake's batch: slots, the queue, ranks and the cache."""

from typing import Any

import pytest

from tests.fakes.support import PROMPT, answer, engine, greedy, is_silent, start
from tests.fakes.tensorrt_llm import LLM
from tests.fakes.tensorrt_llm.llmapi import RequestError, RequestOutput, SchedulingParams
from tests.support.doubles import run_async

LONG = 1500


def on_rank(llm: LLM, rank: int, *, relax: bool, max_tokens: int = LONG) -> RequestOutput:
    return llm.generate_async(
        inputs=PROMPT,
        sampling_params=greedy(max_tokens=max_tokens),
        streaming=True,
        scheduling_params=SchedulingParams(attention_dp_rank=rank, attention_dp_relax=relax),
    )


def test_as_many_requests_run_as_there_are_slots_and_others_wait_in_order() -> None:
    async def play(llm: Any) -> None:
        first, second, third, fourth = (start(llm, max_tokens=count) for count in (20, 40, 5, 5))
        ends = [(await result).decoding_iter for result in (first, second, third, fourth)]

        assert ends == [20, 40, 25, 30]

    with engine(max_batch_size=2) as llm:
        run_async(play(llm))


def test_no_request_is_refused_for_load() -> None:
    async def play(llm: Any) -> None:
        results = [start(llm, max_tokens=1) for _ in range(300)]
        for result in results:
            await result

    with engine(max_batch_size=8) as llm:
        run_async(play(llm))


def test_chunked_prompt_takes_one_step_for_each_chunk() -> None:
    async def play(llm: Any) -> None:
        long = await start(llm, [*b"abcd" * 25], max_tokens=1)
        short = await start(llm, [*b"abc"], max_tokens=1)

        assert long.decoding_iter == 10
        assert short.decoding_iter == 11

    with engine(max_num_tokens=11, enable_chunked_prefill=True) as llm:
        run_async(play(llm))


def test_strict_request_waits_for_its_rank_and_a_relaxed_one_does_not() -> None:
    async def play(llm: Any) -> None:
        blocker = on_rank(llm, 1, relax=False)
        await anext(blocker)
        strict, relaxed = on_rank(llm, 1, relax=False, max_tokens=2), on_rank(llm, 1, relax=True, max_tokens=2)
        await relaxed

        assert await is_silent(strict)
        with pytest.raises(RequestError):
            await on_rank(llm, 2, relax=False)

    with engine(max_batch_size=1, tensor_parallel_size=2, enable_attention_dp=True) as llm:
        run_async(play(llm))


def test_rank_is_ignored_without_attention_data_parallelism() -> None:
    async def play(llm: Any) -> None:
        await on_rank(llm, 5, relax=False, max_tokens=2)

    with engine(tensor_parallel_size=2) as llm:
        run_async(play(llm))


def test_full_prompt_blocks_are_reused_by_the_same_tenant() -> None:
    prompt = [*b"a" * 70]

    async def ask(llm: Any, salt: str | None) -> int:
        params = greedy(max_tokens=1)
        result = await llm.generate_async(inputs=prompt, sampling_params=params, cache_salt=salt)
        return int(result.cached_tokens)

    async def play(llm: Any) -> None:
        assert [await ask(llm, None), await ask(llm, None)] == [0, 64]
        assert [await ask(llm, "x"), await ask(llm, "x")] == [0, 64]

    with engine() as llm:
        run_async(play(llm))


def test_no_block_is_reused_if_reuse_is_off() -> None:
    async def play(llm: Any) -> None:
        for _ in range(2):
            result = await start(llm, [*b"a" * 70], max_tokens=1)
            assert result.cached_tokens == 0

    with engine(kv_cache_config={"enable_block_reuse": False}) as llm:
        run_async(play(llm))


def test_answer_starts_once_there_is_room_for_its_maximum_length() -> None:
    """An answer that can never have enough room fails."""

    async def play(llm: Any) -> None:
        first, second = start(llm, max_tokens=60), start(llm, max_tokens=60)
        await first
        await second

        assert second.decoding_iter == first.decoding_iter + 60
        with pytest.raises(RequestError):
            await answer(llm, max_tokens=200)

    with engine(kv_cache_config={"max_tokens": 128}) as llm:
        run_async(play(llm))
