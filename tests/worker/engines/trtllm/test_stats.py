"""The engine's statistics: one reader, which bears all that they do instead of coming."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.worker.engine import RankLoad
from services.worker.engines.trtllm import stats
from services.worker.engines.trtllm.stats import read_stats
from tests.support import run_async
from tests.worker.engines.trtllm.support import WITHOUT_STATS, Running, asked, llm_of, play


class Llm:
    """Plays one take for each time that it is asked: statistics, then an error or the end."""

    def __init__(self, *takes: list[Any]) -> None:
        self.takes = list(takes)
        self.reader_count = 0

    def get_stats_async(self, timeout: float) -> "Llm":
        assert timeout == stats.WAIT_S
        self.reader_count += 1
        return self

    def __aiter__(self) -> "Llm":
        return self

    async def __anext__(self) -> Any:
        if not self.takes:
            await asyncio.Event().wait()
        take = self.takes[0]
        if not take:
            del self.takes[0]
            raise StopAsyncIteration
        if isinstance(take[0], Exception):
            raise self.takes.pop(0)[0]
        return take.pop(0)


def read(llm: Llm, until: Callable[[list[Any], list[str]], bool]) -> tuple[list[Any], list[str]]:
    """What was read, and the doubts there were."""
    seen: list[Any] = []
    doubts: list[str] = []

    def take(one: Mapping[str, Any]) -> None:
        seen.append(one)

    async def played() -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_stats(llm, take, lambda: doubts.append("doubt")))
            while not until(seen, doubts):
                await asyncio.sleep(0)
            reading.cancel()

    run_async(played())
    return seen, doubts


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "PAUSE_S", 0)


@pytest.mark.parametrize("nothing", [IndexError(), asyncio.QueueEmpty(), TimeoutError()])
def test_it_goes_on_after_every_way_to_say_that_there_is_nothing(nothing: Exception) -> None:
    llm = Llm([{"iter": 1}], [nothing], [], [{"iter": 2}])

    assert read(llm, lambda seen, _: len(seen) == 2) == ([{"iter": 1}, {"iter": 2}], [])


def test_an_error_puts_the_engine_in_doubt_and_ends_the_reading() -> None:
    llm = Llm([{"iter": 1}, RuntimeError("the engine died")], [{"iter": 2}])

    assert read(llm, lambda _, doubts: bool(doubts)) == ([{"iter": 1}], ["doubt"])
    assert llm.reader_count == 1


def test_the_cache_is_known_soon_after_the_first_token_of_all(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        def rank() -> RankLoad:
            return running.engine.load().ranks[0]

        await running.until(lambda: rank().kv_blocks_total > 0)
        assert rank().kv_blocks_used == 0
        running.engine.submit(1, asked(max_tokens=900))
        assert rank().kv_blocks_used == 1

    play(folder, scenario, extra={})


def test_a_cache_that_holds_no_whole_context_is_told_in_the_log(folder: Path) -> None:
    async def scenario(running: Running) -> None:
        await running.until(lambda: running.engine.load().ranks[0].kv_blocks_total > 0)

    with capture_logs() as logs:
        play(folder, scenario, extra={"kv_cache_config": {"max_tokens": 512}})

    [told] = [line for line in logs if line["event"] == "the key-value cache holds less than one whole context"]
    assert (told["tokens"], told["context_length"]) == (512, 1024)


@pytest.mark.parametrize("is_on", [True, False])
def test_statistics_have_one_reader_or_none(folder: Path, is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read them takes them out, so that two readers would each miss some; and they cost the engine time."""

    async def scenario(running: Running) -> set[str]:
        llm, readers = llm_of(running), set()
        ask = llm.get_stats_async

        def noted(timeout: float) -> Any:
            task = asyncio.current_task()
            assert task is not None
            readers.add(task.get_name())
            return ask(timeout=timeout)

        monkeypatch.setattr(llm, "get_stats_async", noted)
        for key in range(1, 9):
            await running.answer(key, asked())
        await asyncio.sleep(0.05)
        return readers

    monkeypatch.setattr(stats, "WAIT_S", 0.01)
    assert len(play(folder, scenario, extra={} if is_on else WITHOUT_STATS)) == int(is_on)
