"""The load of the engine: our own count, or the engine's statistics where they are fresh and lower."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.worker.engine import RankLoad
from services.worker.engines.trtllm import load as load_module
from services.worker.engines.trtllm.load import SAMPLE_FRESH_S, Sample, emptiest_rank, rank_loads, read_stats, sample_of
from tests.support.doubles import run_async
from tests.support.trtllm import WITHOUT_STATS, RunningEngine, llm_of, new_request, play


@dataclass(frozen=True)
class Held:
    """A request on the engine."""

    token_count: int
    prefill_left: int = 0
    rank: int = 0
    begun_at: float = 0.0


def sample(used: int, at: float = 10.0, total: int = 100) -> Sample:
    return Sample(at=at, blocks_total=total, blocks_used=used)


def load(*held: Held, of: Sample | None = None, ranks: int = 1, now: float = 10.0) -> list[RankLoad]:
    return rank_loads(held, of, ranks=ranks, block_tokens=10, now=now)


def test_blocks_of_the_whole_prompt_count_from_the_start() -> None:
    assert load(Held(31, 31), Held(5), of=sample(50)) == [RankLoad(5, 100, 31)]


def test_fresh_statistics_count_shared_blocks_once() -> None:
    assert load(Held(500), Held(400), of=sample(60)) == [RankLoad(60, 100, 0)]


def test_requests_newer_than_the_sample_are_added_to_it() -> None:
    assert load(Held(500), Held(100, begun_at=10.5), of=sample(60), now=10.6) == [RankLoad(60, 100, 0)]
    assert load(Held(500), Held(100, begun_at=10.5), of=sample(20), now=10.6) == [RankLoad(30, 100, 0)]


def test_stale_sample_is_ignored() -> None:
    assert load(Held(500), of=sample(7), now=10.0 + SAMPLE_FRESH_S + 0.1) == [RankLoad(50, 100, 0)]
    assert load(of=sample(60)) == [RankLoad(0, 100, 0)]


def test_used_blocks_never_exceed_the_total() -> None:
    assert load(Held(5000), of=sample(100), now=99.0) == [RankLoad(100, 100, 0)]


def test_block_counts_are_zero_without_a_sample() -> None:
    assert load(Held(50, 50)) == [RankLoad(0, 0, 50)]


def test_each_data_parallel_rank_reports_its_own_load() -> None:
    """The engine does not say which rank its statistics belong to, but all caches have the same size."""
    held = (Held(50, 50, rank=0), Held(20, rank=1), Held(7, 7, rank=1))

    assert load(*held, of=sample(1), ranks=3) == [
        RankLoad(5, 100, 50, 0),
        RankLoad(3, 100, 7, 1),
        RankLoad(0, 100, 0, 2),
    ]


def test_emptiest_rank_has_the_fewest_tokens() -> None:
    assert emptiest_rank([Held(50, rank=0), Held(20, rank=1), Held(40, rank=1)], 2) == 0
    assert emptiest_rank([Held(50, rank=0)], 2) == 1


def test_sample_tolerates_missing_statistics() -> None:
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 9, "usedNumBlocks": 4}}, 1.0) == sample(4, 1.0, 9)
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 9}}, 1.0) == sample(0, 1.0, 9)
    assert sample_of({"kvCacheStats": {"maxNumBlocks": 0}}, 1.0) is None
    assert sample_of({"kvCacheStats": None}, 1.0) is None
    assert sample_of({}, 1.0) is None


class Llm:
    """Plays one script for each read: statistics, then an error or the end."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.reader_count = 0

    def get_stats_async(self, timeout: float) -> "Llm":
        assert timeout == load_module.WAIT_S
        self.reader_count += 1
        return self

    def __aiter__(self) -> "Llm":
        return self

    async def __anext__(self) -> Any:
        if not self.scripts:
            await asyncio.Event().wait()
        script = self.scripts[0]
        if not script:
            del self.scripts[0]
            raise StopAsyncIteration
        if isinstance(script[0], Exception):
            raise self.scripts.pop(0)[0]
        return script.pop(0)


def read(llm: Llm, until: Callable[[list[Any], list[str]], bool]) -> tuple[list[Any], list[str]]:
    """The statistics that were read, and the errors that were reported."""
    seen: list[Any] = []
    doubts: list[str] = []

    def on_stats(one: Mapping[str, Any]) -> None:
        seen.append(one)

    async def played() -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_stats(llm, on_stats, lambda: doubts.append("doubt")))
            while not until(seen, doubts):
                await asyncio.sleep(0)
            reading.cancel()

    run_async(played())
    return seen, doubts


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "PAUSE_S", 0)


@pytest.mark.parametrize("nothing", [IndexError(), asyncio.QueueEmpty(), TimeoutError()])
def test_reading_continues_after_each_exception_that_means_no_statistics(nothing: Exception) -> None:
    llm = Llm([{"iter": 1}], [nothing], [], [{"iter": 2}])

    assert read(llm, lambda seen, _: len(seen) == 2) == ([{"iter": 1}, {"iter": 2}], [])


def test_other_error_ends_the_reading_and_casts_doubt_on_the_engine() -> None:
    llm = Llm([{"iter": 1}, RuntimeError("the engine died")], [{"iter": 2}])

    assert read(llm, lambda _, doubts: bool(doubts)) == ([{"iter": 1}], ["doubt"])
    assert llm.reader_count == 1


def test_cache_size_is_known_soon_after_the_first_token(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        def rank() -> RankLoad:
            return running.engine.load().ranks[0]

        await running.until(lambda: rank().kv_blocks_total > 0)
        assert rank().kv_blocks_used == 0
        running.engine.submit(1, new_request(max_tokens=900))
        assert rank().kv_blocks_used == 1

    play(folder, scenario, extra={})


def test_cache_smaller_than_a_context_is_logged(folder: Path) -> None:
    async def scenario(running: RunningEngine) -> None:
        await running.until(lambda: running.engine.load().ranks[0].kv_blocks_total > 0)

    with capture_logs() as logs:
        play(folder, scenario, extra={"kv_cache_config": {"max_tokens": 512}})

    [warning] = [line for line in logs if line["event"] == "the key-value cache holds less than one whole context"]
    assert (warning["tokens"], warning["context_length"]) == (512, 1024)


@pytest.mark.parametrize("is_on", [True, False])
def test_statistics_have_at_most_one_reader(folder: Path, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading removes statistics, so two readers would each miss some; and each read costs the engine time."""

    async def scenario(running: RunningEngine) -> set[str]:
        llm, readers = llm_of(running), set()
        ask = llm.get_stats_async

        def noted(timeout: float) -> Any:
            task = asyncio.current_task()
            assert task is not None
            readers.add(task.get_name())
            return ask(timeout=timeout)

        monkeypatch.setattr(llm, "get_stats_async", noted)
        for key in range(1, 9):
            await running.answer(key, new_request())
        await asyncio.sleep(0.05)
        return readers

    monkeypatch.setattr(load_module, "WAIT_S", 0.01)
    assert len(play(folder, scenario, extra={} if is_on else WITHOUT_STATS)) == int(is_on)
