"""The fake's results: the objects that an iteration returns in 1.2.1, with their pitfalls."""

import asyncio
from typing import Any

import pytest

from tests.fakes.support import END_ID, PROMPT, SILENCE_S, answer, engine, greedy, start
from tests.fakes.tensorrt_llm import SamplingParams
from tests.fakes.tensorrt_llm.executor.utils import AsyncQueue, notify_many
from tests.fakes.tensorrt_llm.llmapi import RequestOutput
from tests.support.doubles import run_async


def two_answers() -> SamplingParams:
    return SamplingParams(n=2, temperature=1.0, top_p=1.0, end_id=END_ID, ignore_eos=True, max_tokens=4)


def test_every_iteration_returns_the_same_object_with_all_tokens_so_far() -> None:
    async def play(llm: Any) -> None:
        result = start(llm, max_tokens=5)
        seen, lengths, by_diff = set(), [], list[int]()
        async for item in result:
            seen.add(id(item))
            lengths.append(len(item.outputs[0].token_ids))
            by_diff += item.outputs[0].token_ids_diff

        assert seen == {id(result)}
        assert lengths == [1, 2, 3, 4, 5]
        assert by_diff == result.outputs[0].token_ids

    with engine() as llm:
        run_async(play(llm))


def test_token_depends_on_all_tokens_before_it_and_nothing_else() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=64)

        assert await answer(llm, PROMPT + whole[:20], max_tokens=44) == whole[20:]
        assert await answer(llm, PROMPT[1:], max_tokens=64) != whole

    with engine() as llm:
        run_async(play(llm))


def test_another_engine_continues_with_the_same_tokens() -> None:
    with engine() as one, engine() as other:
        whole = run_async(answer(one, max_tokens=30))

        assert run_async(answer(other, PROMPT + whole[:9], max_tokens=21)) == whole[9:]


def test_answer_is_mostly_ascii_text() -> None:
    async def play(llm: Any) -> None:
        result = await start(llm, max_tokens=400, detokenize=True)

        assert len(result.outputs[0].text) > 360
        assert sum(map(str.isascii, result.outputs[0].text)) > 360

    with engine() as llm:
        run_async(play(llm))


def test_answer_ends_by_itself_unless_ignore_eos_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ignore_eos, the end token is an ordinary token."""
    monkeypatch.setenv("TLLM_FAKE_END_ODDS", "9")

    async def play(llm: Any) -> None:
        ended = await start(llm, max_tokens=500, ignore_eos=False)
        whole = await answer(llm, max_tokens=500)

        assert ended.outputs[0].finish_reason == "stop"
        assert ended.outputs[0].stop_reason is None
        assert ended.outputs[0].token_ids == whole[: whole.index(END_ID) + 1]
        assert len(whole) == 500

    with engine() as llm:
        run_async(play(llm))


def test_end_token_may_be_missing_from_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_END_ODDS", "9")
    monkeypatch.setenv("TLLM_FAKE_END_IN_TOKENS", "0")

    async def play(llm: Any) -> None:
        ended = await start(llm, max_tokens=500, ignore_eos=False, logprobs=1)

        assert ended.outputs[0].finish_reason == "stop"
        assert END_ID not in ended.outputs[0].token_ids
        assert len(ended.outputs[0].logprobs) == len(ended.outputs[0].token_ids)

    with engine() as llm:
        run_async(play(llm))


def test_stop_token_is_removed_and_named_as_the_stop_reason() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=30)
        stop = whole[20]
        stopped = await start(llm, max_tokens=30, stop_token_ids=[stop])
        kept = await start(llm, max_tokens=30, stop_token_ids=[stop], include_stop_str_in_output=True)

        assert stopped.outputs[0].stop_reason == stop
        assert stopped.outputs[0].token_ids == whole[: whole.index(stop)]
        assert kept.outputs[0].token_ids == whole[: whole.index(stop) + 1]

    with engine() as llm:
        run_async(play(llm))


def test_token_list_shrinks_at_a_stop_of_several_tokens() -> None:
    async def play(llm: Any) -> None:
        whole = await answer(llm, max_tokens=30)
        params = greedy(max_tokens=30, end_id=None, stop=bytes(whole[10:14]).decode("ascii"))
        lengths = [len(item.outputs[0].token_ids) async for item in start(llm, params=params)]

        assert lengths[-2:] == [13, 10]

    with engine() as llm:
        run_async(play(llm))


def test_stop_strings_together_with_an_end_id_fail_the_request() -> None:
    async def play(llm: Any) -> None:
        with pytest.raises(RuntimeError, match="not processed by tokenizer"):
            await start(llm, stop="x")

    with engine() as llm:
        run_async(play(llm))


def test_diffs_of_the_other_answers_are_stale() -> None:
    async def play(llm: Any) -> None:
        by_diff: list[int] = []
        async for item in start(llm, params=two_answers()):
            by_diff += item.outputs[0].token_ids_diff

        assert len(item.outputs) == 2
        assert [len(output.token_ids) for output in item.outputs] == [4, 4]
        assert len(by_diff) > 4

    with engine() as llm:
        run_async(play(llm))


def test_each_of_several_answers_takes_a_slot() -> None:
    async def play(llm: Any) -> None:
        result = start(llm, params=two_answers())
        lengths = [[len(output.token_ids) for output in item.outputs] async for item in result]

        assert [4, 0] in lengths

    with engine(max_batch_size=1) as llm:
        run_async(play(llm))


def test_request_without_streaming_has_one_item() -> None:
    async def play(llm: Any) -> None:
        result = llm.generate_async(inputs=PROMPT, sampling_params=greedy(max_tokens=7))

        assert [len(item.outputs[0].token_ids) async for item in result] == [7]

    with engine() as llm:
        run_async(play(llm))


def test_stream_interval_bundles_tokens() -> None:
    async def play(llm: Any) -> None:
        lengths = [len(item.outputs[0].token_ids) async for item in start(llm, max_tokens=11)]

        assert lengths == [1, 4, 8, 11]

    with engine(stream_interval=4) as llm:
        run_async(play(llm))


def test_result_created_without_a_loop_is_for_synchronous_use_only() -> None:
    async def play(result: RequestOutput) -> None:
        with pytest.raises(AssertionError, match="event loop"):
            await anext(result)

    with engine() as llm:
        result = start(llm, max_tokens=3)

        run_async(play(result))
        assert len(result.result(timeout=0.0).outputs[0].token_ids) == 3


def test_all_readers_are_woken_through_the_loop_of_the_first_one() -> None:
    """Submit and read on one loop: a reader on another loop may not wake up."""

    async def make() -> AsyncQueue[int]:
        return AsyncQueue()

    async def play(elsewhere: AsyncQueue[int]) -> None:
        here: AsyncQueue[int] = AsyncQueue()
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(here.get())
            await asyncio.sleep(0)
            here.sync_q.put(1)
            notify_many([elsewhere, here])
            done, _ = await asyncio.wait([reader], timeout=SILENCE_S)
            notify_many([here, elsewhere])

        assert not done
        assert reader.result() == 1

    loop = asyncio.new_event_loop()
    elsewhere = loop.run_until_complete(make())
    run_async(play(elsewhere))
    loop.close()


def test_engine_modifies_the_sampling_params() -> None:
    async def play(llm: Any) -> None:
        params = SamplingParams(max_tokens=2)
        await start(llm, params=params)

        assert params.end_id == END_ID
        assert params.pad_id == END_ID

    with engine() as llm:
        run_async(play(llm))
