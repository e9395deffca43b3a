"""What the llama.cpp engine reports is true at each moment; what is cancelled costs it the decode under way at most."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from services.core.request import Guided, GuidedKind, Request
from services.worker.engine import EngineLoad, RankLoad
from tests.worker.engines.llamacpp.support import CONTEXT_LENGTH, PROMPT, TIMEOUT_S, YES_OR_NO, Bench, request

pytestmark = pytest.mark.model

SLOTS = 3
QUIET = RankLoad(0, SLOTS * 3, 0)  # Blocks of 32 tokens.
LONG = (PROMPT * 20)[:80]
PIECE_TOKENS = 16
TALK = request(max_tokens=CONTEXT_LENGTH, ignore_eos=True)
READ = request(prompt=LONG, max_tokens=1)
HELD = request(prompt=LONG, guided=YES_OR_NO)


@dataclass
class Cost:
    """What the counters grew by."""

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
    """Wait for the engine's thread without letting the event loop hear of it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline


async def settle(bench: Bench) -> list[int]:
    """One more answer: when it has come, the thread has read all mail that was sent before. Costs 5 tokens and 4."""
    tokens, _ = await bench.answer(request(max_tokens=4))
    return tokens


def left(bench: Bench) -> int:
    return bench.engine.load().ranks[0].active_prefill_tokens


def test_a_request_counts_from_its_submission_until_it_is_cancelled(bench: Bench, runner: asyncio.Runner) -> None:
    """In the mailbox, and while its form is made, too: no heartbeat shows an idle engine that has work."""

    async def scenario() -> None:
        for waiting in (READ, HELD):
            assert bench.engine.load().ranks == (QUIET,)
            key = bench.submit(waiting)
            assert bench.engine.load().ranks == (RankLoad(3, SLOTS * 3, 80),)
            bench.engine.cancel(key)
        assert bench.engine.load().ranks == (QUIET,)
        await settle(bench)
        assert bench.engine.load().ranks == (QUIET,)

    runner.run(scenario())


def test_the_load_goes_down_with_the_prompt_and_up_with_the_answer(bench: Bench, runner: asyncio.Runner) -> None:
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
    assert len(set(prefill)) >= 4, "it was seen on its way"
    assert {rank.kv_blocks_total for rank in seen} == {SLOTS * 3}
    assert seen[0].kv_blocks_used == 3 + 1
    assert max(rank.kv_blocks_used for rank in seen) <= 3 + 2
    assert bench.engine.load().ranks == (QUIET,)


def test_a_full_engine_reads_as_full(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> RankLoad:
        keys = [bench.submit(request(prompt=(PROMPT * 20)[: CONTEXT_LENGTH - 1])) for _ in range(SLOTS)]
        full = bench.engine.load().ranks[0]
        for key in keys:
            bench.engine.cancel(key)
        return full

    full = runner.run(scenario())

    assert full.kv_blocks_used == full.kv_blocks_total


def test_the_counters_are_what_was_asked_and_got_when_nobody_left(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> Cost:
        await settle(bench)  # Of what other tests have cancelled nothing is under way any more.
        before = bench.engine.load()
        whole = await settle(bench)
        keys = [bench.submit(one) for one in (request(max_tokens=4).after(whole[:2]), READ, HELD)]
        await bench.until(lambda: all(bench.finish(key) is not None for key in keys))
        grown = cost(before, bench.engine.load())
        grown.generated -= len(bench.tokens(keys[2]))
        return grown

    assert runner.run(scenario()) == Cost(prefill=5 + 7 + 80 + 80, generated=4 + 2 + 1, late=0)


def in_the_mailbox(bench: Bench) -> int:
    return bench.submit(READ)


def while_its_form_is_made(bench: Bench) -> int:
    return bench.submit(HELD)


def in_prefill(bench: Bench) -> int:
    key, before = bench.submit(READ), left(bench)
    spin(lambda: left(bench) < before)
    return key


def running(bench: Bench) -> int:
    return _drawn(bench, TALK)


def at_its_last_token(bench: Bench) -> int:
    """Drawn, but on its way to the event loop."""
    return _drawn(bench, request(max_tokens=1))


def _drawn(bench: Bench, asked: Request) -> int:
    before, key = bench.engine.load().generated_tokens, bench.submit(asked)
    spin(lambda: bench.engine.load().generated_tokens > before)
    return key


# How many tokens, of prompts and answers, are computed at most after it is cancelled there.
STATES: dict[Callable[[Bench], int], int] = {
    in_the_mailbox: 0,
    while_its_form_is_made: 0,
    in_prefill: PIECE_TOKENS,
    running: 1,
    at_its_last_token: 0,
}


@pytest.mark.parametrize("state", STATES)
def test_a_cancel_stops_the_work_and_harms_nobody(
    bench: Bench, runner: asyncio.Runner, state: Callable[[Bench], int]
) -> None:
    """An abort for an id that had just finished took a whole backend down elsewhere."""
    late_max = STATES[state]

    async def scenario() -> tuple[list[int], list[int], Cost]:
        alone = await settle(bench)
        key = state(bench)
        bench.engine.cancel(key)
        before = bench.engine.load()
        bench.engine.cancel(key)
        neighbours = [bench.submit(request(max_tokens=4)) for _ in range(SLOTS)]  # All places are free again.
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


def test_what_the_thread_computes_for_whom_has_left_is_counted(bench: Bench, runner: asyncio.Runner) -> None:
    """The loop sees that a piece is done while the next decode is under way, so its cancel comes during that; almost
    always, whence several tries."""

    async def scenario() -> int:
        before = bench.engine.load()
        for _ in range(20):
            bench.engine.cancel(in_prefill(bench))
            await settle(bench)
            if late := cost(before, bench.engine.load()).late:
                return late
        return 0

    assert 1 <= runner.run(scenario()) <= PIECE_TOKENS


def test_an_unknown_key_is_ignored(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        bench.engine.cancel(10**9)
        await settle(bench)

    runner.run(scenario())


def test_a_cancelled_form_that_waits_is_never_made(bench: Bench, runner: asyncio.Runner) -> None:
    """Else those who have left hold up, for seconds, the forms of those who have come."""
    held = request(guided=Guided(GuidedKind.REGEX, ("[a-z ]{200}",)))

    async def scenario() -> None:
        for _ in range(2000):  # More than may wait.
            bench.engine.cancel(bench.submit(held))
        key = bench.submit(HELD)
        await bench.until(lambda: bench.finish(key) is not None)

    runner.run(scenario())


def test_a_cancelled_request_emits_nothing_more_and_leaves_its_place(bench: Bench, runner: asyncio.Runner) -> None:
    async def scenario() -> tuple[int, int]:
        keys = [bench.submit(TALK) for _ in range(SLOTS)]
        await bench.until(lambda: all(bench.of(key) for key in keys))
        bench.engine.cancel(keys[0])
        count = len(bench.of(keys[0]))
        after = bench.submit(request(max_tokens=3))  # takes the place that was left
        await bench.until(lambda: bench.finish(after) is not None)
        for key in keys:
            bench.engine.cancel(key)
        return count, len(bench.of(keys[0]))

    count, count_later = runner.run(scenario())

    assert count_later == count
