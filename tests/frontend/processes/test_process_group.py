"""A group answers as one: what any process has is found, what is set is set in all, what was counted stays."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.frontend.processes.ipc import JoinResponse, RemoteControl
from services.frontend.processes.metrics_merge import parsed
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.routing.thresholds import Thresholds
from tests.frontend.processes.support import Process, supervised
from tests.support.doubles import run_async

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
SOON_S = 0.2
"""How long a process is waited for that is known not to answer."""
PIDS = {"one": 101, "other": 102, "third": 103}


class Stage:
    """A group and the processes that joined it."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self.group = group
        self.folder = folder
        self.lives: dict[str, AsyncExitStack] = {}

    async def join(self, name: str) -> tuple[Process, JoinResponse]:
        process = Process()
        path = self.folder / f"{name}.{len(list(self.folder.iterdir()))}.sock"
        life = self.lives[name] = AsyncExitStack()
        await life.enter_async_context(process.living(path))
        return process, self.group.join(name, path, PIDS[name])

    def remote(self, name: str) -> RemoteControl:
        (path,) = self.folder.glob(f"{name}.*.sock")
        return RemoteControl(path, answer_s_max=10)

    @contextmanager
    def hushed(self, name: str, process: Process) -> Iterator[None]:
        """It answers nothing meanwhile, and is not waited for for long: the others are."""
        (remote,) = (one.control for one in self.group._processes if one.name == name)
        patience, remote._timeout = remote._timeout, aiohttp.ClientTimeout(total=SOON_S)
        process.whole.speaks.clear()
        yield
        process.whole.speaks.set()
        remote._timeout = patience

    async def die(self, name: str) -> None:
        await self.lives.pop(name).aclose()

    async def value(self, name: str) -> float | None:
        for group in parsed(await self.group.exposition()):
            for sample in group.samples:
                if sample.name == name:
                    return sample.value
        return None


def play(scene: Callable[[Stage], Awaitable[Any]]) -> None:
    async def run() -> None:
        async with supervised(answer_s_max=10) as (group, folder):
            stage = Stage(group, folder)
            try:
                await scene(stage)
            finally:
                for life in stage.lives.values():
                    await life.aclose()

    run_async(run())


# Metrics


def test_counters_and_gauges_are_those_of_all() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        one.requests.inc(1)
        other.requests.inc(2)
        one.inflight.set(3)

        assert await stage.value("p_requests_total") == 3
        assert await stage.value("p_inflight_requests") == 3
        assert await stage.value("p_processes") == 2

    play(scene)


def test_what_the_dead_had_counted_when_last_asked_stays_and_is_counted_once() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        one.requests.inc(5)
        one.inflight.set(1)
        other.requests.inc(1)
        await stage.value("p_requests_total")
        await stage.die("one")
        seen = [await stage.value("p_requests_total") for _ in range(3)]
        gauges = [await stage.value("p_inflight_requests"), await stage.value("p_processes")]
        successor, _ = await stage.join("one")
        successor.requests.inc(10)

        assert seen == [6, 6, 6]
        assert gauges == [0, 1]
        assert await stage.value("p_requests_total") == 16

    play(scene)


def test_a_successor_ends_the_account_of_who_had_its_name_even_before_that_is_seen_to_be_dead() -> None:
    async def scene(stage: Stage) -> None:
        one, _ = await stage.join("one")
        one.requests.inc(5)
        await stage.value("p_requests_total")
        await stage.die("one")
        await stage.join("one")

        assert await stage.value("p_requests_total") == 5
        assert await stage.value("p_processes") == 1

    play(scene)


def test_a_silent_process_has_its_counters_and_not_its_gauges() -> None:
    """It may come back: then it tells all of its own."""

    async def scene(stage: Stage) -> None:
        one, _ = await stage.join("one")
        one.requests.inc(5)
        one.inflight.set(1)
        await stage.value("p_requests_total")
        with stage.hushed("one", one), capture_logs() as logs:
            silent = [await stage.value(f"p_{name}") for name in ("requests_total", "inflight_requests", "processes")]
        one.requests.inc(1)

        assert silent == [5, None, 0]
        assert logs[0]["event"] == "a process does not answer"
        assert await stage.value("p_requests_total") == 6
        assert await stage.value("p_inflight_requests") == 1

    play(scene)


# Cancels


def test_a_cancel_by_name_finds_the_request_wherever_it_is() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        calls = [Call(request_id="mine"), Call(request_id="mine"), Call(request_id="other's")]
        one.gate.enter(calls[0])
        other.gate.enter(calls[1])
        other.gate.enter(calls[2])

        assert [await stage.group.cancel("mine"), await stage.group.cancel("mine")] == [2, 0]
        assert [call.ending.failure is not None for call in calls] == [True, True, False]

    play(scene)


def test_a_cancel_that_found_nothing_says_if_somebody_did_not_answer() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        with stage.hushed("other", other):
            with pytest.raises(
                Failure, match=r"1 of 2 processes .*\(pid 102\), the others have no such request: ask again"
            ) as caught:
                await stage.group.cancel("mine")
            one.gate.enter(Call(request_id="mine"))
            found = await stage.group.cancel("mine")

        assert caught.value.reason is Reason.STALLED
        assert caught.value.traits.retryable
        assert found == 1

    play(scene)


# Thresholds


def test_what_is_set_is_set_in_all_and_in_who_joins_later() -> None:
    async def scene(stage: Stage) -> None:
        processes = [(await stage.join(name))[0] for name in ("one", "other")]
        await stage.group.set_thresholds("m", {DECODE: 0.5, PREFILL: 7})
        await stage.group.set_thresholds("m", {DECODE: None})
        _, welcome = await stage.join("third")

        for process in processes:
            assert process.thresholds.of("m") == Thresholds(active_prefill_tokens=7)
        assert welcome.changes == {"m": {DECODE: None, PREFILL: 7}}

    play(scene)


def test_changes_come_to_all_in_the_same_order_for_the_next_waits_for_the_last() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        one.whole.speaks.clear()
        async with asyncio.TaskGroup() as group:
            for value in (1, 2):
                group.create_task(stage.group.set_thresholds("m", {PREFILL: value}))
            while not one.whole.asked_count:
                await asyncio.sleep(0)
            await stage.remote("other").cancel("r")  # The second change would have come there before it.
            asked_count = other.whole.asked_count
            one.whole.speaks.set()

        assert asked_count == 2, "the first change and the cancel"
        assert {each.thresholds.of("m") for each in (one, other)} == {Thresholds(active_prefill_tokens=2)}

    play(scene)


def test_who_sets_is_told_if_a_process_has_not_said_that_it_has_it() -> None:
    async def scene(stage: Stage) -> None:
        one, other = (await stage.join("one"))[0], (await stage.join("other"))[0]
        with (
            stage.hushed("other", other),
            pytest.raises(Failure, match=r"1 of 2 processes .*\(pid 102\), the others have done it: ask again"),
        ):
            await stage.group.set_thresholds("m", {PREFILL: 1})

        assert one.thresholds.of("m") == Thresholds(active_prefill_tokens=1)

    play(scene)


def test_who_joins_while_something_is_set_has_it_and_is_not_waited_for() -> None:
    async def scene(stage: Stage) -> None:
        one, _ = await stage.join("one")
        one.whole.speaks.clear()
        async with asyncio.TaskGroup() as group:
            setting = group.create_task(stage.group.set_thresholds("m", {PREFILL: 1}))
            while not one.whole.asked_count:
                await asyncio.sleep(0)
            _, welcome = await stage.join("other")
            one.whole.speaks.set()
        await setting

        assert welcome.changes == {"m": {PREFILL: 1}}

    play(scene)


def test_the_dead_hold_up_nobody() -> None:
    async def scene(stage: Stage) -> None:
        one, _ = await stage.join("one")
        await stage.join("other")
        await stage.die("other")
        await stage.group.set_thresholds("m", {PREFILL: 1})

        assert one.thresholds.of("m") == Thresholds(active_prefill_tokens=1)
        assert await stage.group.cancel("mine") == 0

    play(scene)


def test_a_successor_is_told_that_it_is_one() -> None:
    async def scene(stage: Stage) -> None:
        welcomes = [(await stage.join("one"))[1], (await stage.join("other"))[1]]
        await stage.die("one")
        welcomes.append((await stage.join("one"))[1])

        assert [welcome.is_successor for welcome in welcomes] == [False, False, True]

    play(scene)
