"""Fault injection: each fault happens at its configured token count, and nowhere else."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.core.errors import Failure, Reason
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.worker.engines.support import RunningEngine, new_request, run


@pytest.mark.parametrize("after", [0, 3])
def test_raise_after_fails_each_request_at_its_token_count_and_the_engine_continues(after: int) -> None:
    async def scenario(running: RunningEngine) -> list[tuple[int, Reason | None]]:
        await running.until(lambda: running.end(1))
        running.engine.submit(2, new_request())
        await running.until(lambda: running.end(2))
        ends = [running.end(key) for key in (1, 2)]
        return [
            (len(running.token_ids(key)), end.failure.reason if end and end.failure else None)
            for key, end in enumerate(ends, start=1)
        ]

    assert run(scenario, new_request(), faults=Faults(raise_after=after)) == [(after, Reason.ENGINE_ERROR)] * 2


def test_raise_after_counts_only_tokens_of_this_process() -> None:
    async def scenario(running: RunningEngine) -> int:
        await running.until(lambda: running.end(1))
        return len(running.token_ids(1))

    assert run(scenario, new_request().after([97] * 10), faults=Faults(raise_after=3)) == 3


@pytest.mark.parametrize(("after", "max_tokens"), [(0, 64), (3, 64), (3, 3)])
def test_hang_after_stops_all_steps_for_good(after: int, max_tokens: int) -> None:
    """The step counter no longer changes, and a second request gets no token, although the event loop still runs."""

    async def scenario(running: RunningEngine) -> tuple[int, int]:
        await running.until(lambda: len(running.token_ids(1)) == after)
        running.engine.submit(2, new_request())
        for _ in range(50):
            await asyncio.sleep(0)
        return len(running.token_ids(1)), running.engine.load().steps

    assert run(scenario, new_request(max_tokens=max_tokens), faults=Faults(hang_after=after)) == (after, after)


def test_hold_delays_the_first_step_until_enough_requests_are_there() -> None:
    async def scenario(running: RunningEngine) -> tuple[int, int]:
        for _ in range(50):
            await asyncio.sleep(0)
        before = running.engine.load().steps
        running.engine.submit(3, new_request())
        await running.until(lambda: running.end(3))
        return before, len(running.steps)

    assert run(scenario, new_request(), new_request(), faults=Faults(hold=3)) == (0, 64)


def test_refuse_refuses_exactly_the_configured_number_of_submissions() -> None:
    engine = MockerEngine(MockerConfig(faults=Faults(refuse=2)))
    reasons = []
    for key in range(3):
        try:
            engine.submit(key, new_request())
        except Failure as failure:
            reasons.append(failure.reason)

    assert reasons == [Reason.WORKER_AT_CAPACITY] * 2


DOOMED = """
import asyncio, signal, sys
from services.runtime.loop import run_on_loop
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request

signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))

def emit(outputs):
    for output in outputs:
        print(len(output.token_ids), flush=True)

async def main():
    engine = MockerEngine(MockerConfig(itl_ms=0, faults=Faults({fault})))
    engine.submit(1, make_request((7,), max_tokens={max_tokens}, ignore_eos=True))
    await engine.run(emit, asyncio.Event())

run_on_loop(main())
"""


@contextmanager
def doomed(fault: str, max_tokens: int = 9) -> Iterator[subprocess.Popen[str]]:
    """A process with an engine that has this fault and one request with the prompt (7,). It prints 1 for each token."""
    code = DOOMED.format(fault=fault, max_tokens=max_tokens)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str], lines: int) -> str:
    assert process.stdout is not None
    return "".join(process.stdout.readline() for _ in range(lines))


@pytest.mark.parametrize(("after", "max_tokens"), [(0, 9), (3, 9), (3, 3)])
def test_die_after_kills_the_process_at_its_token_count(after: int, max_tokens: int) -> None:
    with doomed(f"die_after={after}", max_tokens) as process:
        written, _ = process.communicate(timeout=WAIT_S)

        assert process.returncode == -signal.SIGKILL
        assert written == "1\n" * after


def test_die_on_token_kills_the_process_before_the_first_token() -> None:
    with doomed("die_on_token=7") as process:
        written, _ = process.communicate(timeout=WAIT_S)

        assert (process.returncode, written) == (-signal.SIGKILL, "")


def test_die_on_token_ignores_prompts_without_the_token() -> None:
    with doomed("die_on_token=8") as process:
        assert read(process, 9) == "1\n" * 9


def test_freeze_after_stops_the_process_at_its_token_count() -> None:
    with doomed("freeze_after=3") as process:
        written = read(process, 3)
        _, status = os.waitpid(process.pid, os.WUNTRACED)

        assert os.WIFSTOPPED(status)
        assert written == "1\n" * 3
        process.kill()


def test_request_cancelled_while_frozen_draws_no_token_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: RunningEngine) -> None:
        monkeypatch.setattr(os, "kill", lambda _pid, _signal: running.engine.cancel(1))  # Instead of SIGSTOP.
        await running.until(lambda: running.end(2))

        assert running.token_ids(1) == []
        assert running.engine.load().tokens_after_cancel == 0

    run(scenario, new_request(max_tokens=1), new_request(max_tokens=1), faults=Faults(freeze_after=0))


def test_leave_after_sends_sigterm_once_and_the_request_continues() -> None:
    with doomed("leave_after=3") as process:
        assert read(process, 10) == "1\n" * 3 + "SIGTERM\n" + "1\n" * 6


# Suppressed load reports


@pytest.mark.parametrize("after", [0, 3])
def test_mute_after_stops_all_load_reports_at_its_token_count(after: int) -> None:
    async def scenario() -> list[tuple[int, int]]:
        running = RunningEngine(MockerConfig(itl_ms=0, dp_ranks=2, faults=Faults(mute_after=after)))
        seen = [(0, len(running.engine.load().ranks))]
        async with asyncio.TaskGroup() as group:
            engine = group.create_task(running.engine.run(running.emit, asyncio.Event()))
            running.engine.submit(1, new_request(max_tokens=5))
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


def test_mute_rank_never_reports_its_load() -> None:
    engine = MockerEngine(MockerConfig(dp_ranks=3, faults=Faults(mute_rank=1)))

    assert [rank.dp_rank for rank in engine.load().ranks] == [0, 2]
