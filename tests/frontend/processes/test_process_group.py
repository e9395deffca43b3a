"""ProcessGroup acts as one frontend: requests are found in any process, changes reach all, and counters are kept."""

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
from services.core.tenant import EVERYBODY
from services.frontend.processes.ipc import JoinResponse, RemoteControl
from services.frontend.processes.metrics_merge import parsed
from services.frontend.processes.process_group import ProcessGroup
from services.frontend.routing.thresholds import Thresholds
from tests.frontend.processes.support import Process, supervised
from tests.support.doubles import run_async

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
PAUSED_ANSWER_S_MAX = 0.2
"""How long the group waits for a process that is paused."""
PIDS = {"one": 101, "other": 102, "third": 103}


class GroupCase:
    """A process group, and the processes that have joined it."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self.group = group
        self.folder = folder
        self.servers: dict[str, AsyncExitStack] = {}

    async def join(self, name: str) -> tuple[Process, JoinResponse]:
        process = Process()
        path = self.folder / f"{name}.{len(list(self.folder.iterdir()))}.sock"
        server = self.servers[name] = AsyncExitStack()
        await server.enter_async_context(process.serving(path))
        return process, self.group.join(name, path, PIDS[name])

    def remote(self, name: str) -> RemoteControl:
        (path,) = self.folder.glob(f"{name}.*.sock")
        return RemoteControl(path, answer_s_max=10)

    @contextmanager
    def paused(self, name: str, process: Process) -> Iterator[None]:
        """Pause the process, and shorten the wait for its answer only."""
        (remote,) = (one.control for one in self.group._processes if one.name == name)
        timeout, remote._timeout = remote._timeout, aiohttp.ClientTimeout(total=PAUSED_ANSWER_S_MAX)
        process.control.may_answer.clear()
        yield
        process.control.may_answer.set()
        remote._timeout = timeout

    async def exit(self, name: str) -> None:
        await self.servers.pop(name).aclose()

    async def value(self, name: str) -> float | None:
        for group in parsed(await self.group.exposition()):
            for sample in group.samples:
                if sample.name == name:
                    return sample.value
        return None


def run(scenario: Callable[[GroupCase], Awaitable[Any]]) -> None:
    async def run() -> None:
        async with supervised(answer_s_max=10) as (group, folder):
            case = GroupCase(group, folder)
            try:
                await scenario(case)
            finally:
                for server in case.servers.values():
                    await server.aclose()

    run_async(run())


# Metrics


def test_exposition_sums_counters_and_gauges_of_all_processes() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        one.requests.inc(1)
        other.requests.inc(2)
        one.inflight.set(3)

        assert await case.value("p_requests_total") == 3
        assert await case.value("p_inflight_requests") == 3
        assert await case.value("p_processes") == 2

    run(scenario)


def test_counters_of_an_exited_process_are_kept_and_counted_once() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        one.requests.inc(5)
        one.inflight.set(1)
        other.requests.inc(1)
        await case.value("p_requests_total")
        await case.exit("one")
        seen = [await case.value("p_requests_total") for _ in range(3)]
        gauges = [await case.value("p_inflight_requests"), await case.value("p_processes")]
        successor, _ = await case.join("one")
        successor.requests.inc(10)

        assert seen == [6, 6, 6]
        assert gauges == [0, 1]
        assert await case.value("p_requests_total") == 16

    run(scenario)


def test_counters_are_kept_if_a_successor_joins_before_the_exit_is_noticed() -> None:
    async def scenario(case: GroupCase) -> None:
        one, _ = await case.join("one")
        one.requests.inc(5)
        await case.value("p_requests_total")
        await case.exit("one")
        await case.join("one")

        assert await case.value("p_requests_total") == 5
        assert await case.value("p_processes") == 1

    run(scenario)


def test_silent_process_keeps_its_counters_but_not_its_gauges() -> None:
    """If it answers again, its gauges are back."""

    async def scenario(case: GroupCase) -> None:
        one, _ = await case.join("one")
        one.requests.inc(5)
        one.inflight.set(1)
        await case.value("p_requests_total")
        with case.paused("one", one), capture_logs() as logs:
            silent = [await case.value(f"p_{name}") for name in ("requests_total", "inflight_requests", "processes")]
        one.requests.inc(1)

        assert silent == [5, None, 0]
        assert logs[0]["event"] == "a process does not answer"
        assert await case.value("p_requests_total") == 6
        assert await case.value("p_inflight_requests") == 1

    run(scenario)


# Cancels


def test_cancel_finds_requests_in_every_process() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        calls = [Call(request_id="mine"), Call(request_id="mine"), Call(request_id="other's")]
        one.gate.enter(calls[0])
        other.gate.enter(calls[1])
        other.gate.enter(calls[2])

        assert [await case.group.cancel("mine", EVERYBODY), await case.group.cancel("mine", EVERYBODY)] == [2, 0]
        assert [call.ending.failure is not None for call in calls] == [True, True, False]

    run(scenario)


def test_cancel_that_finds_nothing_fails_if_a_process_did_not_answer() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        with case.paused("other", other):
            with pytest.raises(
                Failure, match=r"1 of 2 processes .*\(pid 102\); the others have no such request: send the call again"
            ) as caught:
                await case.group.cancel("mine", EVERYBODY)
            one.gate.enter(Call(request_id="mine"))
            found = await case.group.cancel("mine", EVERYBODY)

        assert caught.value.reason is Reason.STALLED
        assert caught.value.traits.retryable
        assert found == 1

    run(scenario)


# Thresholds


def test_thresholds_are_set_in_all_processes_and_in_those_that_join_later() -> None:
    async def scenario(case: GroupCase) -> None:
        processes = [(await case.join(name))[0] for name in ("one", "other")]
        await case.group.set_thresholds("m", {DECODE: 0.5, PREFILL: 7})
        await case.group.set_thresholds("m", {DECODE: None})
        _, response = await case.join("third")

        for process in processes:
            assert process.thresholds.of("m") == Thresholds(active_prefill_tokens=7)
        assert response.changes == {"m": {DECODE: None, PREFILL: 7}}

    run(scenario)


def test_threshold_changes_reach_every_process_in_the_same_order() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        one.control.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            for value in (1, 2):
                group.create_task(case.group.set_thresholds("m", {PREFILL: value}))
            while not one.control.call_count:
                await asyncio.sleep(0)
            # If the second change were sent early, it would arrive before this.
            await case.remote("other").cancel("r", EVERYBODY)
            call_count = other.control.call_count
            one.control.may_answer.set()

        assert call_count == 2, "the first change and the cancel"
        assert {each.thresholds.of("m") for each in (one, other)} == {Thresholds(active_prefill_tokens=2)}

    run(scenario)


def test_set_thresholds_fails_if_a_process_did_not_answer() -> None:
    async def scenario(case: GroupCase) -> None:
        one, other = (await case.join("one"))[0], (await case.join("other"))[0]
        with (
            case.paused("other", other),
            pytest.raises(
                Failure,
                match=r"1 of 2 processes .*\(pid 102\); the others have applied the change: send the call again",
            ),
        ):
            await case.group.set_thresholds("m", {PREFILL: 1})

        assert one.thresholds.of("m") == Thresholds(active_prefill_tokens=1)

    run(scenario)


def test_process_that_joins_during_a_change_gets_it_and_is_not_waited_for() -> None:
    async def scenario(case: GroupCase) -> None:
        one, _ = await case.join("one")
        one.control.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            setting = group.create_task(case.group.set_thresholds("m", {PREFILL: 1}))
            while not one.control.call_count:
                await asyncio.sleep(0)
            _, response = await case.join("other")
            one.control.may_answer.set()
        await setting

        assert response.changes == {"m": {PREFILL: 1}}

    run(scenario)


def test_exited_process_does_not_delay_calls() -> None:
    async def scenario(case: GroupCase) -> None:
        one, _ = await case.join("one")
        await case.join("other")
        await case.exit("other")
        await case.group.set_thresholds("m", {PREFILL: 1})

        assert one.thresholds.of("m") == Thresholds(active_prefill_tokens=1)
        assert await case.group.cancel("mine", EVERYBODY) == 0

    run(scenario)


def test_join_tells_a_process_whether_it_is_a_successor() -> None:
    async def scenario(case: GroupCase) -> None:
        responses = [(await case.join("one"))[1], (await case.join("other"))[1]]
        await case.exit("one")
        responses.append((await case.join("one"))[1])

        assert [response.is_successor for response in responses] == [False, False, True]

    run(scenario)
