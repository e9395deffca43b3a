"""The load of the llama.cpp engine is always correct, and a cancelled request costs at most the decode in progress."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from services.core.request import Guided, GuidedKind, Request
from services.worker.engine import EngineLoad, RankLoad
from tests.support.clock import WAIT_S
from tests.worker.engines.llamacpp.support import CONTEXT_LENGTH, PROMPT, YES_OR_NO, Bench, request

pytestmark = pytest.mark.model

SLOTS = 3
QUIET = RankLoad(0, SLOTS * 3, 0)  # Blocks of 32 tokens.
LONG = (PROMPT * 20)[:80]
CHUNK_TOKENS = 16
TALK = request(max_tokens=CONTEXT_LENGTH, ignore_eos=True)
READ = request(prompt=LONG, max_tokens=1)
GUIDED = request(prompt=LONG, guided=YES_OR_NO)


@dataclass
class Cost:
    """The growth of the counters."""

    prefill: int
    generated: int
    late: int


def cost(before: EngineLoad, after: EngineLoad) -> Cost:
    return Cost(
        after.prefill_tokens - before.prefill_tokens,
        after.generated_tokens - before.generated_tokens,
        after.tokens_after_cancel - before.tokens_after_cancel,
    )


def spin(condition: Callable[[], bool]) -> None:
    """Wait for the engine's thread while the event loop is blocked."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline


async def settle(bench: Bench) -> list[int]:
    """Run one more answer, so that the thread has read all earlier mail. Costs 5 prompt tokens and 4 generated ones."""
    tokens, _ = await bench.answer(request(max_tokens=4))
    return tokens


def prefill_left(bench: Bench) -> int:
    return bench.engine.load().ranks[0].active_prefill_tokens


def test_request_counts_in_the_load_from_submission_until_its_cancel(bench: Bench, runner: asyncio.Runner) -> None:
    """In the mailbox and during the compilation of its grammar, too: no heartbeat reports such an engine as idle."""

    async def scenario() -> None:
        for waiting in (READ, GUIDED):
            assert bench.engine.load().ranks == (QUIET,)
            key = bench.submit(waiting)
            assert bench.engine.load().ranks == (RankLoad(3, SLOTS * 3, 80),)
            bench.engine.cancel(key)
        assert bench.engine.load().ranks == (QUIET,)
        await settle(bench)
        assert bench.engine.load().ranks == (QUIET,)

    runner.run(scenario())


def test_prefill_load_falls_and_cache_use_grows_while_requests_run(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> list[RankLoad]:
        seen = []
        key = bench.submit(request(prompt=LONG, max_tokens=CONTEXT_LENGTH - 80, ignore_eos=True))
        talking = bench.submit(request(max_tokens=30, ignore_eos=True))
        while bench.finish(key) is None or bench.finish(talking) is None:
            seen.append(bench.engine.load().ranks[0])
            await asyncio.sleep(0)
        return seen

    seen = runner.run(scenario())

    prefill = [rank.active_prefill_tokens for rank in seen]
    assert prefill == sorted(prefill, reverse=True)
    assert (prefill[0], prefill[-1]) == (85, 0)
    assert len(set(prefill)) >= 4, "the load was not observed during the prefill"
    assert {rank.kv_blocks_total for rank in seen} == {SLOTS * 3}
    assert seen[0].kv_blocks_used == 3 + 1
    assert max(rank.kv_blocks_used for rank in seen) <= 3 + 2
    assert bench.engine.load().ranks == (QUIET,)


def test_full_engine_reports_all_blocks_used(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> RankLoad:
        keys = [bench.submit(request(prompt=(PROMPT * 20)[: CONTEXT_LENGTH - 1])) for _ in range(SLOTS)]
        full = bench.engine.load().ranks[0]
        for key in keys:
            bench.engine.cancel(key)
        return full

    full = runner.run(scenario())

    assert full.kv_blocks_used == full.kv_blocks_total


def test_counters_equal_the_tokens_of_requests_that_ran_to_their_end(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> Cost:
        await settle(bench)  # Afterwards no work for requests that other tests cancelled is in progress.
        before = bench.engine.load()
        whole = await settle(bench)
        keys = [bench.submit(one) for one in (request(max_tokens=4).after(whole[:2]), READ, GUIDED)]
        await bench.until(lambda: all(bench.finish(key) is not None for key in keys))
        grown = cost(before, bench.engine.load())
        grown.generated -= len(bench.tokens(keys[2]))
        return grown

    assert runner.run(scenario()) == Cost(prefill=5 + 7 + 80 + 80, generated=4 + 2 + 1, late=0)


def in_the_mailbox(bench: Bench) -> int:
    return bench.submit(READ)


def while_its_grammar_is_compiled(bench: Bench) -> int:
    return bench.submit(GUIDED)


def in_prefill(bench: Bench) -> int:
    key, before = bench.submit(READ), prefill_left(bench)
    spin(lambda: prefill_left(bench) < before)
    return key


def running(bench: Bench) -> int:
    return _drawn(bench, TALK)


def at_its_last_token(bench: Bench) -> int:
    """The token is drawn, and its output has not reached the event loop yet."""
    return _drawn(bench, request(max_tokens=1))


def _drawn(bench: Bench, request: Request) -> int:
    before, key = bench.engine.load().generated_tokens, bench.submit(request)
    spin(lambda: bench.engine.load().generated_tokens > before)
    return key


# The largest number of tokens, of prompts and answers, that are computed after a cancel in this state.
STATES: dict[Callable[[Bench], int], int] = {
    in_the_mailbox: 0,
    while_its_grammar_is_compiled: 0,
    in_prefill: CHUNK_TOKENS,
    running: 1,
    at_its_last_token: 0,
}


@pytest.mark.parametrize("state", STATES)
def test_cancel_stops_the_work_and_leaves_other_answers_intact(
    bench: Bench, runner: asyncio.Runner, state: Callable[[Bench], int]
) -> None:
    """In other systems, an abort for an id that had just finished took a whole backend down."""
    late_max = STATES[state]

    async def scenario() -> tuple[list[int], list[int], Cost]:
        alone = await settle(bench)
        key = state(bench)
        bench.engine.cancel(key)
        before = bench.engine.load()
        bench.engine.cancel(key)
        neighbours = [bench.submit(request(max_tokens=4)) for _ in range(SLOTS)]  # All slots are free again.
        bench.engine.cancel(key)
        await bench.until(lambda: all(bench.finish(one) is not None for one in neighbours))
        bench.engine.cancel(neighbours[0])
        assert bench.of(key) == []
        assert bench.engine.load().ranks == (QUIET,)
        assert all(bench.tokens(one) == alone for one in neighbours)
        return alone, await settle(bench), cost(before, bench.engine.load())

    alone, after, grown = runner.run(scenario())

    assert after == alone
    assert grown.prefill - 5 * (SLOTS + 1) <= late_max
    assert grown.late <= late_max


def test_tokens_computed_after_a_cancel_are_counted(bench: Bench, runner: asyncio.Runner) -> None:
    """The loop sees that a chunk is done while the next decode runs, so its cancel arrives during that decode.

    This holds almost always, so the test tries several times.
    """

    async def scenario() -> int:
        before = bench.engine.load()
        for _ in range(20):
            bench.engine.cancel(in_prefill(bench))
            await settle(bench)
            if late := cost(before, bench.engine.load()).late:
                return late
        return 0

    assert 1 <= runner.run(scenario()) <= CHUNK_TOKENS


def test_cancel_of_an_unknown_key_is_ignored(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        bench.engine.cancel(10**9)
        await settle(bench)

    runner.run(scenario())


def test_cancelled_grammar_that_waits_is_never_compiled(bench: Bench, runner: asyncio.Runner) -> None:
    """Otherwise the grammars of cancelled requests would delay those of new requests by seconds."""
    waiting = request(guided=Guided(GuidedKind.REGEX, ("[a-z ]{200}",)))

    async def scenario() -> None:
        for _ in range(2000):  # More than WAITING_MAX.
            bench.engine.cancel(bench.submit(waiting))
        key = bench.submit(GUIDED)
        await bench.until(lambda: bench.finish(key) is not None)

    runner.run(scenario())


def test_cancelled_request_emits_nothing_more_and_frees_its_slot(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> tuple[int, int]:
        keys = [bench.submit(TALK) for _ in range(SLOTS)]
        await bench.until(lambda: all(bench.of(key) for key in keys))
        bench.engine.cancel(keys[0])
        count = len(bench.of(keys[0]))
        after = bench.submit(request(max_tokens=3))  # Uses the freed slot.
        await bench.until(lambda: bench.finish(after) is not None)
        for key in keys:
            bench.engine.cancel(key)
        return count, len(bench.of(keys[0]))

    count, count_later = runner.run(scenario())

    assert count_later == count
