"""What the mocker reports is what it does, rank by rank; what is cancelled costs it nothing from the next chunk on."""

import asyncio
import random
from typing import Any

import pytest

from services.worker.engine import EngineLoad, RankLoad
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request, run_async
from tests.worker.engines.support import PROMPT, Running, asked, run

QUIET = (RankLoad(0, 65_536, 0),)


def ranks_of(engine: MockerEngine) -> list[tuple[int, int, int]]:
    """Rank, blocks used, prompt tokens to compute."""
    return [(rank.dp_rank, rank.kv_blocks_used, rank.active_prefill_tokens) for rank in engine.load().ranks]


def prompt(token_count: int, max_tokens: int = 1) -> Any:
    return make_request((1,) * token_count, max_tokens=max_tokens, ignore_eos=True)


# Load


def test_the_load_is_that_of_the_sequences_it_has() -> None:
    engine = MockerEngine(MockerConfig(kv_block_tokens=16, kv_blocks_total=100))
    loads = [engine.load()]
    engine.submit(1, make_request((1,) * 16))
    engine.submit(2, make_request((1,) * 16, generated_token_ids=(97,)))
    loads.append(engine.load())
    engine.cancel(1)
    engine.cancel(2)
    loads.append(engine.load())
    ranks = [load.ranks[0] for load in loads]

    assert [rank.kv_blocks_used for rank in ranks] == [0, 3, 0]
    assert [rank.active_prefill_tokens for rank in ranks] == [0, 33, 0]
    assert {rank.kv_blocks_total for rank in ranks} == {100}


def test_the_step_counter_grows_with_every_step_prefill_included() -> None:
    async def scenario(running: Running) -> EngineLoad:
        await running.until(lambda: running.end(1))
        return running.engine.load()

    # Three chunks of prompt, the last of which gives the first of four tokens.
    assert run(scenario, prompt(30, max_tokens=4), prefill_chunk_tokens=10) == EngineLoad(6, QUIET, 30, 4, 0)


def test_a_prompt_is_to_be_computed_until_the_step_with_its_last_chunk_is_over() -> None:
    async def scenario(running: Running) -> list[int]:
        seen = []
        while not running.end(1):
            seen.append(running.engine.load().ranks[0].active_prefill_tokens)
            await asyncio.sleep(0)
        return sorted(set(seen), reverse=True)

    assert run(scenario, prompt(25, max_tokens=4), prefill_chunk_tokens=10) == [25, 15, 5, 0]


def test_the_counters_are_what_was_asked_and_got_when_nobody_left() -> None:
    async def scenario(running: Running) -> EngineLoad:
        await running.until(lambda: running.end(1) and running.end(2))
        return running.engine.load()

    load = run(scenario, asked(max_tokens=9), asked(max_tokens=30).after([97] * 10))

    assert (load.prefill_tokens, load.generated_tokens, load.tokens_after_cancel) == (2 * len(PROMPT) + 10, 9 + 20, 0)


# Ranks


def test_a_request_goes_to_the_rank_with_the_fewest_tokens_and_of_equals_to_the_lowest() -> None:
    engine = MockerEngine(MockerConfig(dp_ranks=3, kv_block_tokens=1))

    for key, tokens in enumerate((8, 5, 4, 2, 1)):
        engine.submit(key, prompt(tokens))
    engine.cancel(0)
    engine.submit(9, prompt(7))

    assert ranks_of(engine) == [(0, 7, 7), (1, 6, 6), (2, 6, 6)]


def test_answers_do_not_depend_on_ranks() -> None:
    async def scenario(running: Running) -> list[list[int]]:
        await running.until(lambda: all(running.end(key) for key in (1, 2, 3)))
        return [running.token_ids(key) for key in (1, 2, 3)]

    requests = asked(), asked(), asked(max_tokens=20)
    assert run(scenario, *requests, dp_ranks=2) == run(scenario, *requests)


def test_each_rank_computes_a_chunk_of_its_own_in_a_step() -> None:
    async def scenario(running: Running) -> int:
        await running.until(lambda: all(running.end(key) for key in (1, 2, 3)))
        return running.engine.load().steps

    three = [prompt(30)] * 3
    assert run(scenario, *three, dp_ranks=3, prefill_chunk_tokens=10) == 3
    assert run(scenario, *three, dp_ranks=1, prefill_chunk_tokens=10) == 9


# A cache that is too small for all


def test_answers_that_outgrow_the_cache_wait_for_each_other_and_are_the_same() -> None:
    async def scenario(running: Running) -> tuple[list[list[int]], EngineLoad]:
        keys = range(1, 6)
        while not all(running.end(key) for key in keys):
            assert all(rank.kv_blocks_used <= rank.kv_blocks_total for rank in running.engine.load().ranks)
            await asyncio.sleep(0)
        return [running.token_ids(key) for key in keys], running.engine.load()

    requests = [asked(max_tokens=length) for length in (60, 50, 40, 60, 10)]
    ample, _ = run(scenario, *requests)
    scarce, load = run(scenario, *requests, kv_blocks_total=12, kv_block_tokens=8)

    assert scarce == ample
    assert load.prefill_tokens > 5 * len(PROMPT), "some had to be computed again"
    assert load.ranks == (RankLoad(0, 12, 0),)


def test_no_context_is_longer_than_the_cache_of_a_rank() -> None:
    assert MockerEngine(MockerConfig(kv_blocks_total=3, kv_block_tokens=8)).card.context_length == 24


# Cancelling


def test_after_cancel_nothing_of_it_is_emitted_any_more_and_nobody_else_notices() -> None:
    async def scenario(running: Running) -> tuple[int, int]:
        await running.until(lambda: len(running.token_ids(1)) == 3)
        running.engine.cancel(1)
        running.engine.cancel(1)
        running.engine.cancel(99)
        await running.until(lambda: running.end(2))
        return len(running.token_ids(1)), len(running.token_ids(2))

    assert run(scenario, asked(), asked()) == (3, 64)


def test_what_is_cancelled_before_its_first_step_costs_nothing() -> None:
    async def scenario(running: Running) -> EngineLoad:
        running.engine.cancel(1)
        running.engine.cancel(1)
        await running.until(lambda: running.end(2))
        return running.engine.load()

    assert run(scenario, asked(), prompt(7), itl_ms=1.0) == EngineLoad(1, QUIET, 7, 1, 0)


async def wait_steps(engine: MockerEngine, count: int) -> None:
    """Until so many are over. The next one is then under way: from step to step the engine sleeps in them alone."""
    while engine.load().steps < count:
        await asyncio.sleep(0)


def test_of_a_prompt_that_is_cancelled_only_the_chunk_under_way_is_still_computed() -> None:
    async def scenario(running: Running) -> tuple[EngineLoad, EngineLoad]:
        await wait_steps(running.engine, 2)
        running.engine.cancel(1)
        before = running.engine.load()
        running.engine.submit(2, prompt(10))
        await running.until(lambda: running.end(2))
        return before, running.engine.load()

    before, after = run(scenario, prompt(1000), prefill_chunk_tokens=10, itl_ms=1.0)

    assert before.ranks == QUIET
    assert after.prefill_tokens == before.prefill_tokens + 10 + 10
    assert (after.generated_tokens, after.tokens_after_cancel) == (1, 10)


def test_an_answer_that_is_cancelled_while_a_step_is_under_way_takes_no_part_in_it() -> None:
    async def scenario(running: Running) -> tuple[int, EngineLoad]:
        await wait_steps(running.engine, 3)
        running.engine.cancel(1)
        before = running.engine.load().generated_tokens
        running.engine.submit(2, prompt(10))
        await running.until(lambda: running.end(2))
        assert len(running.token_ids(1)) == before
        return before, running.engine.load()

    before, after = run(scenario, asked(), itl_ms=1.0)

    assert before >= 3
    assert (after.generated_tokens, after.tokens_after_cancel) == (before + 1, 0)


def test_cancelling_what_has_just_ended_harms_nobody() -> None:
    """An abort for an id that had just finished took a whole backend down elsewhere."""

    async def scenario(running: Running) -> tuple[int, int]:
        await running.until(lambda: running.end(1))
        running.engine.cancel(1)
        running.engine.cancel(1)
        await running.until(lambda: running.end(2))
        return len(running.token_ids(2)), running.engine.load().tokens_after_cancel

    assert run(scenario, asked(max_tokens=3), asked()) == (64, 0)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_goes_the_books_are_right(seed: int) -> None:
    """Two ranks with a cache for about three of the requests each, of which a third is cancelled at some time."""
    dice = random.Random(seed)
    lengths = {key: dice.randint(1, 40) for key in range(1, 25)}
    doomed = dict.fromkeys(dice.sample(list(lengths), 8), False)

    async def whole(running: Running) -> list[int]:
        await running.until(lambda: running.end(1))
        return running.token_ids(1)

    longest = run(whole, asked(max_tokens=40))

    async def scenario(running: Running) -> EngineLoad:
        engine, waiting = running.engine, list(lengths)
        while waiting or not all(running.end(key) or doomed.get(key) for key in lengths):
            if waiting and dice.random() < 0.3:
                key = waiting.pop()
                engine.submit(key, asked(max_tokens=lengths[key]))
            for key in doomed:
                if key not in waiting and dice.random() < 0.05:
                    engine.cancel(key)
                    doomed[key] = True
            assert all(rank.kv_blocks_used <= rank.kv_blocks_total for rank in engine.load().ranks)
            await asyncio.sleep(0)
        for key, length in lengths.items():
            got = running.token_ids(key)
            assert got == longest[: length if running.end(key) else len(got)]
        drawn = sum(len(running.token_ids(key)) for key in lengths)
        assert engine.load().generated_tokens == drawn
        return engine.load()

    load = run(scenario, dp_ranks=2, kv_blocks_total=15, kv_block_tokens=8, prefill_chunk_tokens=10)

    assert [(rank.kv_blocks_used, rank.active_prefill_tokens) for rank in load.ranks] == [(0, 0)] * 2
    assert load.tokens_after_cancel <= 10 * len(doomed)


# Reports that stay away on command


@pytest.mark.parametrize("after", [0, 3])
def test_mute_after_ends_all_reports_when_a_request_has_so_many_tokens(after: int) -> None:
    async def scenario() -> list[tuple[int, int]]:
        running = Running(MockerConfig(itl_ms=0, dp_ranks=2, faults=Faults(mute_after=after)))
        seen = [(0, len(running.engine.load().ranks))]
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(running.engine.run(running.emit, asyncio.Event()))
            running.engine.submit(1, asked(max_tokens=5))
            while not running.end(1):
                await asyncio.sleep(0)
                seen.append((len(running.token_ids(1)), len(running.engine.load().ranks)))
            engine.cancel()
        assert running.engine.load().steps == 5
        return seen[:1] + sorted(set(seen[1:]))

    counts = run_async(scenario())

    assert counts[0] == (0, 2)
    assert {ranks for tokens, ranks in counts[1:] if tokens < after} <= {2}
    assert {ranks for tokens, ranks in counts[1:] if tokens >= after} == {0}


def test_mute_rank_is_never_reported() -> None:
    engine = MockerEngine(MockerConfig(dp_ranks=3, faults=Faults(mute_rank=1)))

    assert [rank.dp_rank for rank in engine.load().ranks] == [0, 2]
