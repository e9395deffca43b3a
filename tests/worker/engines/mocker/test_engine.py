"""The mocker: tokens that prove themselves, continued from any cut, and faults on command."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Request, Sampling
from services.models.tokenizers.byte_level import EOS, ByteTokenizer
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request, run_async
from tests.worker.engines.support import GREEDY, PROMPT, SEEDED, Running, asked, run


def answer(request: Request, **config: Any) -> tuple[list[int], FinishReason | None]:
    """The whole answer, and why it ended."""

    async def scenario(running: Running) -> tuple[list[int], FinishReason | None]:
        await running.until(lambda: running.end(1))
        end = running.end(1)
        assert end is not None
        return running.token_ids(1), end.finish

    result: tuple[list[int], FinishReason | None] = run(scenario, request, **config)
    return result


def tokens(request: Request) -> list[int]:
    return answer(request)[0]


# What the tokens depend on


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_continuation_from_any_cut_equals_the_uncut_answer(sampling: Sampling) -> None:
    whole = asked(sampling)
    uncut = tokens(whole)

    assert len(uncut) == 64
    assert any(token >= 0x80 for token in uncut), "some cuts should go through a character"
    for cut in range(64):
        assert tokens(whole.after(uncut[:cut])) == uncut[cut:], f"cut at {cut}"


@pytest.mark.parametrize("place", [0, 9, len(PROMPT) - 1])
def test_every_token_depends_on_every_token_of_the_prompt(place: int) -> None:
    other = replace(asked(), token_ids=(*PROMPT[:place], PROMPT[place] ^ 1, *PROMPT[place + 1 :]))

    assert tokens(other)[:16] != tokens(asked())[:16]


def test_every_token_depends_on_every_generated_token_and_on_their_order() -> None:
    uncut = tokens(asked())
    begun = uncut[:20]
    missing, doubled, swapped = begun[:-1], [*begun, begun[-1]], [*begun[:-2], begun[-1], begun[-2]]
    assert begun[-1] != begun[-2], "these two are to be told apart"

    for wrong in (missing, doubled, swapped):
        assert tokens(asked().after(wrong))[: 64 - 21] != uncut[20:-1]


def test_greedy_answers_depend_on_neither_seed_nor_choice() -> None:
    assert tokens(asked(replace(GREEDY, seed=2), choice=1)) == tokens(asked(GREEDY))


@pytest.mark.parametrize("other", [{"seed": 2}, {"temperature": 0.9}, {"top_p": 0.5}, {"presence_penalty": 1.0}])
def test_sampled_answers_depend_on_how_they_are_sampled(other: dict[str, float]) -> None:
    assert tokens(asked(replace(SEEDED, **other))) != tokens(asked(SEEDED))


def test_sampled_answers_depend_on_the_choice() -> None:
    assert tokens(asked(SEEDED, choice=1)) != tokens(asked(SEEDED))


def test_answers_do_not_depend_on_what_else_runs() -> None:
    async def scenario(running: Running) -> list[int]:
        await running.until(lambda: running.end(2))
        return running.token_ids(2)

    together = run(scenario, asked(SEEDED), asked(), asked(max_tokens=10))

    assert together == tokens(asked())


def test_answers_are_text_in_many_scripts() -> None:
    written = bytes(tokens(asked(max_tokens=2000))).decode(errors="ignore")

    assert {len(character.encode()) for character in written} == {1, 2, 3, 4}


# How an answer ends


def test_the_end_token_ends_an_answer_and_is_not_among_its_tokens() -> None:
    ended = [answer(asked(replace(SEEDED, seed=seed), max_tokens=200, ignore_eos=False)) for seed in range(20)]
    stopped = [token_ids for token_ids, finish in ended if finish is FinishReason.STOP]

    assert stopped
    assert all(len(token_ids) < 200 and EOS not in token_ids for token_ids in stopped)


def stopping() -> tuple[Request, list[int]]:
    """A request whose answer the end token ends early, and that answer."""
    for seed in range(100):
        request = asked(replace(SEEDED, seed=seed), max_tokens=200, ignore_eos=False)
        token_ids, finish = answer(request)
        if finish is FinishReason.STOP and len(token_ids) > 20:
            return request, token_ids
    raise AssertionError("no answer ended by itself")


def test_ignore_eos_goes_on_after_it() -> None:
    request, stopped = stopping()
    token_ids, finish = answer(replace(request, stop=replace(request.stop, ignore_eos=True)))

    assert (len(token_ids), finish) == (200, FinishReason.LENGTH)
    assert token_ids[: len(stopped)] == stopped


def test_min_tokens_holds_the_end_token_off() -> None:
    request, stopped = stopping()
    token_ids, _ = answer(replace(request, stop=replace(request.stop, min_tokens=len(stopped) + 1)))

    assert len(token_ids) > len(stopped)
    assert token_ids[: len(stopped)] == stopped


def test_min_tokens_counts_the_tokens_that_a_continued_request_brings() -> None:
    request, stopped = stopping()
    request = replace(request, stop=replace(request.stop, min_tokens=len(stopped)))

    assert answer(request.after(stopped[:10])) == (stopped[10:], FinishReason.STOP)


def test_a_stop_token_ends_the_answer_before_it() -> None:
    uncut = tokens(asked())
    stop = uncut[30]
    before = uncut[: uncut.index(stop)]

    assert answer(asked(token_ids=PROMPT, stop=replace(asked().stop, token_ids=(stop,)))) == (before, FinishReason.STOP)


def test_min_tokens_holds_stop_tokens_off_too() -> None:
    uncut = tokens(asked())
    stop = replace(asked().stop, token_ids=(uncut[5],), min_tokens=64)
    token_ids, finish = answer(asked(stop=stop))

    assert (len(token_ids), finish) == (64, FinishReason.LENGTH)
    assert uncut[5] not in token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 64])
def test_max_tokens_is_over_the_whole_continuation(max_tokens: int) -> None:
    uncut = tokens(asked())

    assert answer(asked(max_tokens=max_tokens)) == (uncut[:max_tokens], FinishReason.LENGTH)
    assert answer(asked(max_tokens=max_tokens).after(uncut[: max_tokens - 1]))[0] == uncut[max_tokens - 1 : max_tokens]


def test_a_request_whose_limit_is_met_already_finishes_without_a_token() -> None:
    assert answer(asked(max_tokens=3).after([97, 98, 99])) == ([], FinishReason.LENGTH)


def test_the_context_ends_an_answer() -> None:
    token_ids, finish = answer(asked(), context_length=len(PROMPT) + 5)

    assert (len(token_ids), finish) == (5, FinishReason.LENGTH)


# Steps


def test_a_step_gives_every_running_sequence_one_token() -> None:
    async def scenario(running: Running) -> list[list[int]]:
        await running.until(lambda: len(running.steps) == 3)
        return [[output.key for output in step] for step in running.steps[:3]]

    assert run(scenario, asked(), asked()) == [[1, 2]] * 3


def test_an_engine_whose_last_sequence_was_cancelled_goes_on_with_the_next() -> None:
    async def scenario(running: Running) -> int:
        await running.until(lambda: running.token_ids(1))
        running.engine.cancel(1)
        running.engine.submit(2, asked())
        await running.until(lambda: running.end(2))
        return len(running.token_ids(2))

    assert run(scenario, asked()) == 64


def test_a_long_prompt_is_computed_in_chunks_while_the_others_go_on() -> None:
    async def scenario(running: Running) -> int:
        running.engine.submit(2, asked())
        await running.until(lambda: running.token_ids(2))
        running.engine.submit(3, make_request((1,) * 100, max_tokens=1))
        before = len(running.token_ids(2))
        await running.until(lambda: running.end(3))
        return len(running.token_ids(2)) - before

    # 100 tokens in chunks of 10 are ten steps, besides one that may have been under way.
    assert run(scenario, prefill_chunk_tokens=10) in (10, 11)


def test_a_prompt_of_one_chunk_costs_its_time() -> None:
    async def scenario(running: Running) -> float:
        began = asyncio.get_running_loop().time()
        await running.until(lambda: running.token_ids(1))
        return asyncio.get_running_loop().time() - began

    assert run(scenario, make_request((1,) * 50), prefill_us_per_token=1000) >= 0.05


def test_tokens_come_itl_apart() -> None:
    async def scenario(running: Running) -> float:
        began = asyncio.get_running_loop().time()
        await running.until(lambda: len(running.token_ids(1)) == 10)
        return asyncio.get_running_loop().time() - began

    assert run(scenario, asked(), itl_ms=5.0) >= 0.049


def test_is_ready_once_it_has_loaded() -> None:
    async def scenario() -> float:
        ready, clock = asyncio.Event(), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            began = clock()
            engine = group.create_task(MockerEngine(MockerConfig(startup_s=0.05)).run(lambda _: None, ready))
            await ready.wait()
            engine.cancel()
            return clock() - began

    assert run_async(scenario()) >= 0.05


# Faults


@pytest.mark.parametrize("after", [0, 3])
def test_raise_after_fails_every_request_there_and_the_engine_goes_on(after: int) -> None:
    async def scenario(running: Running) -> list[tuple[int, Reason | None]]:
        await running.until(lambda: running.end(1))
        running.engine.submit(2, asked())
        await running.until(lambda: running.end(2))
        ends = [running.end(key) for key in (1, 2)]
        return [
            (len(running.token_ids(key)), end.failure.reason if end and end.failure else None)
            for key, end in enumerate(ends, start=1)
        ]

    assert run(scenario, asked(), faults=Faults(raise_after=after)) == [(after, Reason.ENGINE_ERROR)] * 2


def test_raise_after_counts_what_this_process_gave() -> None:
    async def scenario(running: Running) -> int:
        await running.until(lambda: running.end(1))
        return len(running.token_ids(1))

    assert run(scenario, asked().after([97] * 10), faults=Faults(raise_after=3)) == 3


@pytest.mark.parametrize(("after", "max_tokens"), [(0, 64), (3, 64), (3, 3)])
def test_hang_after_stops_the_engine_for_good(after: int, max_tokens: int) -> None:
    """The step counter stands still and a second request gets nothing. The watchdog is a loop that has gone on."""

    async def scenario(running: Running) -> tuple[int, int]:
        await running.until(lambda: len(running.token_ids(1)) == after)
        running.engine.submit(2, asked())
        for _ in range(50):
            await asyncio.sleep(0)
        return len(running.token_ids(1)), running.engine.load().steps

    assert run(scenario, asked(max_tokens=max_tokens), faults=Faults(hang_after=after)) == (after, after)


def test_hold_makes_no_step_before_there_are_so_many_requests_and_then_all_go_together() -> None:
    async def scenario(running: Running) -> tuple[int, int]:
        for _ in range(50):
            await asyncio.sleep(0)
        before = running.engine.load().steps
        running.engine.submit(3, asked())
        await running.until(lambda: running.end(3))
        return before, len(running.steps)

    assert run(scenario, asked(), asked(), faults=Faults(hold=3)) == (0, 64)


def test_refuse_refuses_so_many_submissions_and_no_more() -> None:
    engine = MockerEngine(MockerConfig(faults=Faults(refuse=2)))
    reasons = []
    for key in range(3):
        try:
            engine.submit(key, asked())
        except Failure as failure:
            reasons.append(failure.reason)

    assert reasons == [Reason.WORKER_AT_CAPACITY] * 2


DOOMED = """
import asyncio, signal, sys
from services.runtime.loop import run_on_loop
from services.worker.engines.mocker import Faults, MockerConfig, MockerEngine
from tests.support.doubles import make_request

signal.signal(signal.SIGTERM, lambda *_: print("asked to leave", flush=True))

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
    """A process with an engine that has this fault, and one request whose prompt is token 7; it writes 1 a token."""
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
def test_die_after_kills_the_process_there(after: int, max_tokens: int) -> None:
    with doomed(f"die_after={after}", max_tokens) as process:
        written, _ = process.communicate(timeout=20)

        assert process.returncode == -signal.SIGKILL
        assert written == "1\n" * after


def test_die_on_token_kills_the_process_before_the_first_token() -> None:
    with doomed("die_on_token=7") as process:
        written, _ = process.communicate(timeout=20)

        assert (process.returncode, written) == (-signal.SIGKILL, "")


def test_a_prompt_without_the_token_is_harmless() -> None:
    with doomed("die_on_token=8") as process:
        assert read(process, 9) == "1\n" * 9


def test_freeze_after_stops_the_process_there() -> None:
    with doomed("freeze_after=3") as process:
        written = read(process, 3)
        _, status = os.waitpid(process.pid, os.WUNTRACED)

        assert os.WIFSTOPPED(status)
        assert written == "1\n" * 3
        process.kill()


def test_who_left_while_the_process_was_frozen_takes_no_part_in_the_step_after(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(running: Running) -> None:
        monkeypatch.setattr(os, "kill", lambda _pid, _signal: running.engine.cancel(1))  # In place of the stop.
        await running.until(lambda: running.end(2))

        assert running.token_ids(1) == []
        assert running.engine.load().tokens_after_cancel == 0

    run(scenario, asked(max_tokens=1), asked(max_tokens=1), faults=Faults(freeze_after=0))


def test_leave_after_asks_the_process_to_leave_once_while_the_request_goes_on() -> None:
    with doomed("leave_after=3") as process:
        assert read(process, 10) == "1\n" * 3 + "asked to leave\n" + "1\n" * 6


def test_its_card_says_that_log_probabilities_go_on_exactly_too() -> None:
    async def scenario(running: Running) -> list[Any]:
        await running.until(lambda: running.end(1))
        return [one for step in running.steps for output in step for one in output.logprobs or ()]

    whole = asked(SEEDED, logprobs=3)
    uncut = run(scenario, whole)

    assert MockerEngine(MockerConfig()).card.resume.logprobs
    assert run(scenario, whole.after(tokens(whole)[:30])) == uncut[30:]


def test_its_card_is_enough_to_read_its_tokens() -> None:
    engine = MockerEngine(MockerConfig(served_model_name="m"))

    assert (engine.card.model, engine.card.vocab_size) == ("m", len(ByteTokenizer.token_bytes))
    assert engine.tokenizer_content() == b""
