"""Guides: each guided answer has a helper process, and whatever its grammar does to it costs nobody else anything."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.request import Guided, GuidedKind, Request
from services.isolation.pool import HelperPool
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.guided import guides as module
from services.worker.guided.guide import Guide
from services.worker.guided.guide_jobs import encode_vocabulary
from services.worker.guided.guides import Guides, guide_pool
from tests.runtime.supervision.support import is_alive, until
from tests.support.doubles import run_async
from tests.worker.guided.hostile import HOSTILE, HOSTILE_CPU_S, LATE

ANSWERS_MAX = 8
CHOICE = Guided(GuidedKind.CHOICE, ("yes", "no"))


class Bench:
    """Guides with real helper processes, and the answers that have begun."""

    def __init__(self, pool: HelperPool) -> None:
        self.pool = pool
        loop = asyncio.get_running_loop()
        self._guides = Guides(pool, loop.call_soon_threadsafe)

    def serve(self, guided: Guided, generated: bytes = b"") -> "Served":
        request = Request(model="m", guided=guided, generated_token_ids=tuple(generated))
        served = Served()
        served.task = asyncio.get_running_loop().create_task(self._guides.serve(request, served.begun.set_result))
        return served

    async def failure(self, guided: Guided) -> Failure:
        """The failure of a request whose grammar cannot be compiled."""
        with pytest.raises(Failure) as caught:
            await self.serve(guided).task
        return caught.value


class Served:
    """One guided answer. `begun`: its guide, once its grammar is compiled."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.begun: asyncio.Future[Guide] = asyncio.get_running_loop().create_future()

    async def allowed(self) -> list[int]:
        """The tokens that may follow. Raises Failure."""
        guide = await self._ready()
        mask = guide.token_mask()
        return [8 * index + bit for index, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]

    async def _ready(self) -> Guide:
        every: list[asyncio.Future[Any]] = [self.begun, self.task]
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
        if not self.begun.done():
            self.task.result()
        guide = self.begun.result()
        await until(lambda: guide.wait_ready(0))
        return guide

    async def accept(self, text: bytes) -> None:
        for token in text:
            (await self._ready()).accept_token(token)

    async def is_complete(self) -> bool:
        return (await self._ready()).is_complete

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


@asynccontextmanager
async def bench_of(answers_max: int) -> AsyncIterator[Bench]:
    pool = guide_pool(encode_vocabulary(ByteTokenizer.token_bytes, [EOS]), answers_max)
    try:
        yield Bench(pool)
    finally:
        await pool.close()


def with_bench(scenario: Callable[[Bench], Awaitable[None]], answers_max: int = ANSWERS_MAX) -> None:
    async def run() -> None:
        async with bench_of(answers_max) as bench:
            await scenario(bench)

    run_async(run())


def helper_pids() -> set[int]:
    """The pids of the helpers of this process: the children of its fork servers. Its other children have none."""
    return {helper for child in _children(os.getpid()) for helper in _children(child)}


def _is_gone(pid: int) -> bool:
    return not is_alive(pid)


def _children(pid: int) -> set[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for task in tasks for child in task.read_text().split()}


def test_guide_says_which_tokens_may_follow_each_token() -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(CHOICE)

        assert await served.allowed() == [ord("n"), ord("y")]
        await served.accept(b"n")
        assert await served.allowed() == [ord("o")]
        assert not await served.is_complete()
        await served.accept(b"o")
        assert await served.is_complete()
        await served.end()

    with_bench(scenario)


def test_continued_answer_is_guided_after_the_tokens_that_it_has() -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(CHOICE, b"ye")
        assert await served.allowed() == [ord("s")]
        await served.end()

    with_bench(scenario)


@pytest.mark.parametrize(
    ("guided", "generated", "reason"),
    [
        (Guided(GuidedKind.REGEX, ("(",)), b"", Reason.INVALID_ARGUMENT),
        (Guided(GuidedKind.GRAMMAR, ("root ::= root",)), b"", Reason.INVALID_ARGUMENT),
        (CHOICE, b"maybe", Reason.GRAMMAR_REPLAY_MISMATCH),
    ],
)
def test_text_that_is_refused_never_begins(guided: Guided, generated: bytes, reason: Reason) -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(guided, generated)
        with pytest.raises(Failure) as caught:
            await served.task
        assert caught.value.reason is reason
        assert not served.begun.done()

    with_bench(scenario)


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_text_is_refused_alone_and_beside_it_an_answer_goes_on(
    hostile: Guided, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_CPU_S_MAX", HOSTILE_CPU_S)

    async def scenario(bench: Bench) -> None:
        beside = bench.serve(Guided(GuidedKind.REGEX, ("a*",)))
        await beside.accept(b"a")

        failure = await bench.failure(hostile)

        assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "guided")
        assert failure.detail.startswith(f"guided.{hostile.kind} cannot be used: ")
        await beside.accept(b"aaa")
        assert await beside.allowed() == [ord("a"), EOS]
        await beside.end()

    with_bench(scenario)


def test_text_that_is_hostile_only_after_its_first_tokens_fails_its_answer() -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(LATE.guided)
        await served.accept(LATE.tokens)

        with pytest.raises(Failure) as caught:
            await served.allowed()

        assert (caught.value.reason, caught.value.param) == (Reason.INVALID_ARGUMENT, "guided")
        await served.task

    with_bench(scenario)


def test_helper_that_is_killed_from_outside_is_replaced_and_the_answer_goes_on() -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(Guided(GuidedKind.REGEX, ("abcdef",)))
        for text in (b"ab", b"cd"):
            await served.accept(text)
            await served.allowed()
            [pid] = helper_pids()
            os.kill(pid, signal.SIGKILL)
            await until(partial(_is_gone, pid))
        await served.accept(b"e")
        assert await served.allowed() == [ord("f")]
        await served.end()

    with_bench(scenario)


def test_helper_ends_with_its_answer() -> None:
    async def scenario(bench: Bench) -> None:
        served = bench.serve(CHOICE)
        await served.allowed()
        assert len(helper_pids()) == 1
        await served.end()
        await until(lambda: not helper_pids())

    with_bench(scenario)


def test_more_answers_than_are_compiled_at_a_time_all_begin() -> None:
    async def scenario(bench: Bench) -> None:
        every = [bench.serve(CHOICE) for _ in range(ANSWERS_MAX)]
        for served in every:
            assert await served.allowed() == [ord("n"), ord("y")]
        for served in every:
            await served.end()

    with_bench(scenario)


def test_answer_that_waits_too_long_for_its_compilation_goes_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILING_MAX", 1)
    monkeypatch.setattr(module, "COMPILING_WAIT_S_MAX", 0.05)

    async def scenario(bench: Bench) -> None:
        slow = bench.serve(HOSTILE["a multiple of a large number"])
        await until(lambda: bool(helper_pids()))
        failure = await bench.failure(CHOICE)
        assert failure.reason is Reason.WORKER_AT_CAPACITY
        await slow.end()

    async def start_first() -> None:
        async with bench_of(ANSWERS_MAX) as bench:
            await bench.pool.load()
            await scenario(bench)

    run_async(start_first())


def test_pool_without_a_place_sends_the_request_elsewhere() -> None:
    async def scenario(bench: Bench) -> None:
        every = [bench.serve(CHOICE) for _ in range(2)]
        await every[0].allowed()
        failure = await bench.failure(CHOICE)
        assert failure.reason is Reason.WORKER_AT_CAPACITY
        for served in every:
            await served.end()

    with_bench(scenario, answers_max=1)
