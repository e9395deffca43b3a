"""The mocker's load is correct for each rank, and a cancelled request costs at most the chunk in progress."""

import asyncio
import random
from typing import Any

import pytest

from services.worker.engine import EngineLoad, RankLoad
from services.worker.engines.mocker import MockerConfig, MockerEngine
from tests.support.doubles import make_request
from tests.worker.engines.support import PROMPT, RunningEngine, new_request, run

QUIET = (RankLoad(0, 65_536, 0),)


def ranks_of(engine: MockerEngine) -> list[tuple[int, int, int]]:
    """The rank, the blocks used and the prompt tokens to compute, for each rank."""
    return [(rank.dp_rank, rank.kv_blocks_used, rank.active_prefill_tokens) for rank in engine.load().ranks]


def prompt(token_count: int, max_tokens: int = 1) -> Any:
    return make_request((1,) * token_count, max_tokens=max_tokens, ignore_eos=True)


# Load


def test_load_counts_every_submitted_sequence_that_is_not_cancelled() -> None:
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


def test_step_counter_grows_with_every_step_including_prefill() -> None:
    async def scenario(running: RunningEngine) -> EngineLoad:
        await running.until(lambda: running.end(1))
        return running.engine.load()

    # Three chunks of prompt; the last one also gives the first of four tokens.
    assert run(scenario, prompt(30, max_tokens=4), prefill_chunk_tokens=10) == EngineLoad(6, QUIET, 30, 4, 0)


def test_prefill_load_falls_chunk_by_chunk() -> None:
    async def scenario(running: RunningEngine) -> list[int]:
        seen = []
        while not running.end(1):
            seen.append(running.engine.load().ranks[0].active_prefill_tokens)
            await asyncio.sleep(0)
        return sorted(set(seen), reverse=True)

    assert run(scenario, prompt(25, max_tokens=4), prefill_chunk_tokens=10) == [25, 15, 5, 0]


def test_counters_equal_the_tokens_of_requests_that_ran_to_their_end() -> None:
    async def scenario(running: RunningEngine) -> EngineLoad:
        await running.until(lambda: running.end(1) and running.end(2))
        return running.engine.load()

    load = run(scenario, new_request(max_tokens=9), new_request(max_tokens=30).after([97] * 10))

    assert (load.prefill_tokens, load.generated_tokens, load.tokens_after_cancel) == (2 * len(PROMPT) + 10, 9 + 20, 0)


# Ranks


def test_request_goes_to_the_lowest_of_the_ranks_with_the_fewest_tokens() -> None:
    engine = MockerEngine(MockerConfig(dp_ranks=3, kv_block_tokens=1))

    for key, tokens in enumerate((8, 5, 4, 2, 1)):
        engine.submit(key, prompt(tokens))
    engine.cancel(0)
    engine.submit(9, prompt(7))

    assert ranks_of(engine) == [(0, 7, 7), (1, 6, 6), (2, 6, 6)]


def test_answers_do_not_depend_on_ranks() -> None:
    async def scenario(running: RunningEngine) -> list[list[int]]:
        await running.until(lambda: all(running.end(key) for key in (1, 2, 3)))
        return [running.token_ids(key) for key in (1, 2, 3)]

    requests = new_request(), new_request(), new_request(max_tokens=20)
    assert run(scenario, *requests, dp_ranks=2) == run(scenario, *requests)


def test_each_rank_computes_its_own_chunk_in_a_step() -> None:
    async def scenario(running: RunningEngine) -> int:
        await running.until(lambda: all(running.end(key) for key in (1, 2, 3)))
        return running.engine.load().steps

    three = [prompt(30)] * 3
    assert run(scenario, *three, dp_ranks=3, prefill_chunk_tokens=10) == 3
    assert run(scenario, *three, dp_ranks=1, prefill_chunk_tokens=10) == 9


# A cache that is too small for all requests


def test_answers_that_outgrow_the_cache_take_turns_and_stay_the_same() -> None:
    async def scenario(running: RunningEngine) -> tuple[list[list[int]], EngineLoad]:
        keys = range(1, 6)
        while not all(running.end(key) for key in keys):
            assert all(rank.kv_blocks_used <= rank.kv_blocks_total for rank in running.engine.load().ranks)
            await asyncio.sleep(0)
        return [running.token_ids(key) for key in keys], running.engine.load()

    requests = [new_request(max_tokens=length) for length in (60, 50, 40, 60, 10)]
    ample, _ = run(scenario, *requests)
    scarce, load = run(scenario, *requests, kv_blocks_total=12, kv_block_tokens=8)

    assert scarce == ample
    assert load.prefill_tokens > 5 * len(PROMPT), "some prompts had to be computed again"
    assert load.ranks == (RankLoad(0, 12, 0),)


def test_cache_of_a_rank_bounds_the_context() -> None:
    assert MockerEngine(MockerConfig(kv_blocks_total=3, kv_block_tokens=8)).card.context_length == 24


# Cancelling


def test_cancelled_request_emits_nothing_more_and_others_continue() -> None:
    async def scenario(running: RunningEngine) -> tuple[int, int]:
        await running.until(lambda: len(running.token_ids(1)) == 3)
        running.engine.cancel(1)
        running.engine.cancel(1)
        running.engine.cancel(99)
        await running.until(lambda: running.end(2))
        return len(running.token_ids(1)), len(running.token_ids(2))

    assert run(scenario, new_request(), new_request()) == (3, 64)


def test_request_cancelled_before_its_first_step_costs_nothing() -> None:
    async def scenario(running: RunningEngine) -> EngineLoad:
        running.engine.cancel(1)
        running.engine.cancel(1)
        await running.until(lambda: running.end(2))
        return running.engine.load()

    assert run(scenario, new_request(), prompt(7), itl_ms=1.0) == EngineLoad(1, QUIET, 7, 1, 0)


async def wait_steps(engine: MockerEngine, count: int) -> None:
    """Wait until `count` steps are over. The next step is then in progress, because the engine sleeps only in steps."""
    while engine.load().steps < count:
        await asyncio.sleep(0)


def test_cancelled_prompt_costs_only_the_chunk_in_progress() -> None:
    async def scenario(running: RunningEngine) -> tuple[EngineLoad, EngineLoad]:
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


def test_answer_cancelled_during_a_step_draws_no_token_in_it() -> None:
    async def scenario(running: RunningEngine) -> tuple[int, EngineLoad]:
        await wait_steps(running.engine, 3)
        running.engine.cancel(1)
        before = running.engine.load().generated_tokens
        running.engine.submit(2, prompt(10))
        await running.until(lambda: running.end(2))
        assert len(running.token_ids(1)) == before
        return before, running.engine.load()

    before, after = run(scenario, new_request(), itl_ms=1.0)

    assert before >= 3
    assert (after.generated_tokens, after.tokens_after_cancel) == (before + 1, 0)


def test_cancel_of_a_request_that_has_just_ended_does_not_affect_others() -> None:
    """In other systems, an abort for an id that had just finished took a whole backend down."""

    async def scenario(running: RunningEngine) -> tuple[int, int]:
        await running.until(lambda: running.end(1))
        running.engine.cancel(1)
        running.engine.cancel(1)
        await running.until(lambda: running.end(2))
        return len(running.token_ids(2)), running.engine.load().tokens_after_cancel

    assert run(scenario, new_request(max_tokens=3), new_request()) == (64, 0)


@pytest.mark.parametrize("seed", range(8))
def test_load_and_counters_are_correct_under_random_submissions_and_cancels(seed: int) -> None:
    """Two ranks have room for about three requests each; a third of all requests is cancelled at a random time."""
    dice = random.Random(seed)
    lengths = {key: dice.randint(1, 40) for key in range(1, 25)}
    is_cancelled = dict.fromkeys(dice.sample(list(lengths), 8), False)

    async def whole(running: RunningEngine) -> list[int]:
        await running.until(lambda: running.end(1))
        return running.token_ids(1)

    longest = run(whole, new_request(max_tokens=40))

    async def scenario(running: RunningEngine) -> EngineLoad:
        engine, waiting = running.engine, list(lengths)
        while waiting or not all(running.end(key) or is_cancelled.get(key) for key in lengths):
            if waiting and dice.random() < 0.3:
                key = waiting.pop()
                engine.submit(key, new_request(max_tokens=lengths[key]))
            for key in is_cancelled:
                if key not in waiting and dice.random() < 0.05:
                    engine.cancel(key)
                    is_cancelled[key] = True
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
    assert load.tokens_after_cancel <= 10 * len(is_cancelled)
