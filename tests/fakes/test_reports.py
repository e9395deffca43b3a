"""The fake's statistics and cache events: one queue each, and reading removes entries."""

import asyncio
from collections.abc import AsyncIterable
from typing import Any

import pytest

from tests.fakes.support import answer, engine, start
from tests.support.doubles import run_async

QUICKLY_S = 0.05


@pytest.fixture(autouse=True)
def _stats_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLLM_FAKE_STATS_MS", "1")


async def read(items: AsyncIterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item async for item in items]


def test_reports_before_the_first_request_are_empty_or_an_error() -> None:
    async def play(llm: Any) -> None:
        assert await read(llm.get_stats_async(QUICKLY_S)) == []
        with pytest.raises(AssertionError):
            llm.get_kv_cache_events_async(QUICKLY_S)
        with pytest.raises(AssertionError):
            llm.get_kv_cache_events(QUICKLY_S)

    with engine(enable_iter_perf_stats=True) as llm:
        assert llm.get_stats(QUICKLY_S) == []
        run_async(play(llm))


def test_statistics_are_off_by_default() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, max_tokens=5)

        assert await read(llm.get_stats_async(QUICKLY_S)) == []

    with engine() as llm:
        run_async(play(llm))


def test_statistics_of_each_step_are_returned_once_to_the_first_reader() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, max_tokens=5)
        stats = await read(llm.get_stats_async(QUICKLY_S))

        assert [item["iter"] for item in stats] == [1, 2, 3, 4, 5]
        assert stats[0]["numActiveRequests"] == 1
        assert stats[0]["maxNumActiveRequests"] == 4
        assert stats[0]["kvCacheStats"]["maxNumBlocks"] == 4 * 2048 // 32
        assert stats[0]["kvCacheStats"]["usedNumBlocks"] == 1
        assert stats[-1]["numActiveRequests"] == 0

    with engine(enable_iter_perf_stats=True, max_batch_size=4) as llm:
        run_async(play(llm))


def test_statistics_count_waiting_requests() -> None:
    async def play(llm: Any) -> None:
        results = [start(llm, max_tokens=5) for _ in range(3)]
        for result in results:
            await result
        stats = await read(llm.get_stats_async(QUICKLY_S))

        assert max(item["numQueuedRequests"] for item in stats) == 2

    with engine(enable_iter_perf_stats=True, max_batch_size=1) as llm:
        run_async(play(llm))


def test_iterator_is_shared_and_exhausted_until_the_next_request() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, max_tokens=2)
        reader = llm.get_stats_async(QUICKLY_S)
        await read(reader)
        second = llm.get_stats_async(10.0)

        assert second is reader
        async with asyncio.timeout(1):
            assert await read(second) == []

        await answer(llm, max_tokens=3)
        assert len(await read(llm.get_stats_async(QUICKLY_S))) == 3

    with engine(enable_iter_perf_stats=True) as llm:
        run_async(play(llm))


def test_reader_cancelled_while_statistics_arrive_ends() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, max_tokens=2)
        items = llm.get_stats_async(10.0)
        async with asyncio.TaskGroup() as group:
            reader = group.create_task(read(items))
            await asyncio.sleep(0)
            while items.queue.qsize():
                await asyncio.sleep(0)
            items.put(["{}"])
            await asyncio.sleep(0)
            reader.cancel()
        assert reader.cancelled()

    with engine(enable_iter_perf_stats=True) as llm:
        run_async(play(llm))


def test_cache_events_name_blocks_and_their_parents_in_order() -> None:
    prompt = [*b"a" * 70]

    async def play(llm: Any) -> None:
        await answer(llm, prompt, max_tokens=1)
        await answer(llm, prompt, max_tokens=1)
        created, first, second = await read(llm.get_kv_cache_events_async(QUICKLY_S))

        assert [created["event_id"], first["event_id"], second["event_id"]] == [0, 1, 2]
        assert created["data"]["type"] == "created"
        assert first["data"]["parent_hash"] is None
        assert second["data"]["parent_hash"] == first["data"]["blocks"][0]["block_hash"]
        assert [token["token_id"] for token in first["data"]["blocks"][0]["tokens"]] == prompt[:32]

    with engine(kv_cache_config={"event_buffer_max_size": 100}) as llm:
        run_async(play(llm))


def test_removed_blocks_are_reported() -> None:
    async def play(llm: Any) -> None:
        for letter in b"abc":
            await answer(llm, [letter] * 70, max_tokens=1)
        events = await read(llm.get_kv_cache_events_async(QUICKLY_S))
        stored = [event for event in events if event["data"]["type"] == "stored"]
        removed = [event for event in events if event["data"]["type"] == "removed"]

        assert len(stored) == 6
        assert removed[0]["data"]["block_hashes"] == [stored[0]["data"]["blocks"][0]["block_hash"]]

    with engine(kv_cache_config={"event_buffer_max_size": 100, "max_tokens": 96}) as llm:
        run_async(play(llm))


def test_dropped_events_leave_a_gap_in_the_ids() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, [*b"a" * 200], max_tokens=1)
        events = await read(llm.get_kv_cache_events_async(QUICKLY_S))

        assert [event["event_id"] for event in events][-2:] == [5, 6]
        assert len(events) < 7

    with engine(kv_cache_config={"event_buffer_max_size": 2}) as llm:
        run_async(play(llm))


def test_events_name_their_rank() -> None:
    async def play(llm: Any) -> None:
        await answer(llm, max_tokens=1)
        events = await read(llm.get_kv_cache_events_async(QUICKLY_S))

        assert {event["attention_dp_rank"] for event in events} == {0, 1}

    kv_cache_config = {"event_buffer_max_size": 100}
    with engine(kv_cache_config=kv_cache_config, tensor_parallel_size=2, enable_attention_dp=True) as llm:
        run_async(play(llm))
