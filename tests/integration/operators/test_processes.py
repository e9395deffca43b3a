"""A frontend of several processes is one frontend to its clients and operators, and to them alone: each dies alone.

| workload | nemesis | checker |
| --- | --- | --- |
| requests over many connections | – | both processes serve, and metrics count each once |
| what operators set; cancels by name | the connection may end in either process | it acts in both |
| a burst at one worker | N and Q far below | N + Q are in |
| streams in both | SIGKILL of one process | the others' streams go on; it comes back as it was |
| the same | SIGTERM of the supervisor | all streams end well, and all processes |
| – | SIGKILL of the supervisor | no process is left |
"""

import asyncio
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import aiohttp
import grpc
import pytest

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.admin_calls import DECODE, get, post
from tests.integration.harness.answers import Answer, Refused
from tests.integration.harness.asks import PROTOCOLS, Ask
from tests.integration.harness.clients import answer, gathered, outcome, under_streams
from tests.integration.harness.plane import Frontend, Plane, Process, until, wait_until
from tests.integration.harness.readings import read, wait_load, wait_quiet
from tests.integration.harness.visits import ENDLESS, Visit

OPTIONS = ("--processes=2", "--admission-control=token-capacity")
NAMES = {"frontend-1", "frontend-2"}
CONNECTIONS = 16
"""Each ends in either process: all in the same once in 2^15 times."""
SLOW = "--mocker-itl-ms=20"


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Iterator[Plane]:
    plane = start_plane(frontend=OPTIONS)
    yield plane
    assert not plane.frontend.events(level="error")


async def worker_of(plane: Plane, *options: str, model: str = "mocker") -> Process:
    """A worker that both processes have found."""
    worker = plane.launch(*options, f"--served-model-name={model}")
    await until(lambda: worker.is_ready)
    instance = worker.ready["instance_id"]
    await until(lambda: {line["process"] for line in plane.frontend.events("worker found", instance=instance)} == NAMES)
    return worker


def children(frontend: Frontend) -> list[int]:
    """The pids of a supervisor's processes."""
    return [int(pid) for pid in Path(f"/proc/{frontend.pid}/task/{frontend.pid}/children").read_text().split()]


def servers_of(frontend: Frontend, **fields: Any) -> Counter[str]:
    """How many requests each process says to have served."""
    return Counter(line["process"] for line in frontend.events("request", **fields))


def test_both_serve_and_metrics_count_each_request_once(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, model="shared")
        asks = [Ask(PROTOCOLS[number % 3], model="shared", max_tokens=4) for number in range(3 * CONNECTIONS)]
        await gathered(answer(plane.frontend, ask) for ask in asks)
        await wait_quiet(plane.frontend)
        reading = await read(plane.frontend)

        assert servers_of(plane.frontend, model="shared").keys() == NAMES
        assert reading.sum("dynamo_frontend_requests_total", model="shared") == len(asks)
        assert reading.sum("dynamo_frontend_output_sequence_tokens_sum", model="shared") == 4 * len(asks)
        assert reading.sum("dynamo_frontend_model_migration_limit", model="shared") == 3, "not once for each process"
        assert reading.sum("dynamo_frontend_processes") == 2

    asyncio.run(scenario())


def test_what_is_set_in_one_acts_in_both(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, SLOW, model="watched")
        frontend, short = plane.frontend, Ask(model="watched", max_tokens=2)
        async with asyncio.TaskGroup() as group:
            running = [
                Visit(frontend, Ask(model="watched", max_tokens=ENDLESS)).start(group) for _ in range(CONNECTIONS)
            ]
            await until(lambda: all(visit.has_begun for visit in running))
            await post(frontend, {"model": "watched", DECODE: 0.0})
            listed = [(await get(frontend))["watched"] for _ in range(CONNECTIONS)]
            await until(lambda: are_all_refused(frontend, short))  # Once both have heard of the worker's load.
            await post(frontend, {"model": "watched", DECODE: None})
            answered = await gathered(outcome(frontend, short) for _ in range(CONNECTIONS))
            for visit in running:
                visit.leave()

        assert all(one[DECODE] == 0.0 for one in listed)
        assert all(isinstance(one, Answer) for one in answered)
        assert servers_of(frontend, model="watched", outcome="OVERLOADED").keys() == NAMES

    asyncio.run(scenario())


async def are_all_refused(frontend: Frontend, ask: Ask) -> bool:
    outcomes = await gathered(outcome(frontend, ask) for _ in range(CONNECTIONS))
    return all(isinstance(one, Refused) and one.reason == "OVERLOADED" for one in outcomes)


async def cancel(frontend: Frontend, name: str, protocol: str) -> int:
    """How many requests of that name were ended."""
    if protocol == "grpc":
        async with grpc.aio.insecure_channel(frontend.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            return int((await stub.Cancel(inference_pb2.CancelRequest(request_id=name))).cancelled)
    url = f"{frontend.http}/v1/requests/{name}/cancel"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return int((await response.json())["cancelled"])


def test_a_request_is_cancelled_by_its_name_in_whichever_process_it_is(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, SLOW, model="cancelled")
        asks = [Ask(PROTOCOLS[number % 2], model="cancelled", max_tokens=ENDLESS) for number in range(CONNECTIONS)]
        async with asyncio.TaskGroup() as group:
            visits = [Visit(plane.frontend, ask.named(f"c{number}")).start(group) for number, ask in enumerate(asks)]
            await until(lambda: all(visit.has_begun for visit in visits))
            counts = [
                await cancel(plane.frontend, f"c{number}", PROTOCOLS[number // 2 % 2]) for number in range(len(asks))
            ]
            refusals = [await visit.refusal() for visit in visits]

        assert counts == [1] * len(asks)
        assert {refusal.reason for refusal in refusals} == {"CANCELLED"}
        assert servers_of(plane.frontend, model="cancelled").keys() == NAMES

    asyncio.run(scenario())


def test_of_a_burst_exactly_n_and_q_are_in(plane: Plane) -> None:
    slots, places, burst = 2, 3, 40

    async def scenario() -> None:
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await worker_of(plane, SLOW, *limits, model="small")
        async with asyncio.TaskGroup() as group:
            visits = [
                Visit(plane.frontend, Ask(PROTOCOLS[number % 3], model="small", max_tokens=ENDLESS)).start(group)
                for number in range(burst)
            ]
            await until(lambda: sum(visit.is_refused for visit in visits) == burst - slots - places)
            await wait_load(worker, slots, places)
            for visit in visits:
                visit.leave()
        await wait_quiet(worker, plane.frontend)

    asyncio.run(scenario())


# What ends


async def whole_or_cut(frontend: Frontend, ask: Ask) -> Answer | None:
    """The answer; None where the connection ended before it was complete."""
    try:
        return await answer(frontend, ask)
    except aiohttp.ClientError:
        return None
    except Refused as refused:
        if refused.code == "UNAVAILABLE":
            return None
        raise


def test_a_process_that_is_killed_costs_its_own_streams_alone_and_comes_back_as_it_was(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)

    async def scenario() -> None:
        await worker_of(plane, SLOW)
        frontend = plane.frontend
        asks = [Ask(PROTOCOLS[number % 2], max_tokens=40) for number in range(CONNECTIONS)]
        await post(frontend, {"model": "mocker", DECODE: 0.9})
        undisturbed = await answer(frontend, asks[1])
        before = await frontend.metric("dynamo_frontend_requests_total")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(whole_or_cut(frontend, ask)) for ask in asks]
            await until(lambda: has_inflight(frontend, CONNECTIONS))
            victim = children(frontend)[0]
            os.kill(victim, SIGKILL)
        answers = [task.result() for task in tasks]
        await until(lambda: has_processes(frontend, 2))

        whole = [one.essence for one in answers if one is not None]
        assert 0 < len(whole) < CONNECTIONS
        assert set(whole) == {undisturbed.essence}
        assert victim not in children(frontend)
        again = [(await get(frontend))["mocker"] for _ in range(CONNECTIONS)]
        assert all(one[DECODE] == 0.9 for one in again), "a process that comes later has what was set"
        served = servers_of(frontend)
        await gathered(answer(frontend, ask) for ask in asks)
        assert (servers_of(frontend) - served).keys() == NAMES
        await wait_quiet(frontend)
        counted = await frontend.metric("dynamo_frontend_requests_total")
        assert counted == before + len(whole) + CONNECTIONS, "what it had counted before it died is counted still"
        assert not frontend.events(outcome="NO_WORKERS"), "it took clients before it had workers"
        assert not frontend.events(level="error")

    asyncio.run(scenario())


async def has_inflight(frontend: Frontend, count: int) -> bool:
    return await frontend.metric("dynamo_frontend_inflight_requests") == count


async def has_processes(frontend: Frontend, count: int) -> bool:
    return await frontend.metric("dynamo_frontend_processes") == count


def test_sigterm_lets_the_streams_of_all_processes_end(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)

    async def scenario() -> None:
        await worker_of(plane, SLOW)
        asks = [Ask(PROTOCOLS[number % 2], max_tokens=40) for number in range(CONNECTIONS)]
        pids = children(plane.frontend)
        undisturbed = await answer(plane.frontend, asks[1])

        async def end() -> None:
            plane.frontend.signal(SIGTERM)

        answers = await under_streams(plane.frontend, asks, end)
        await until(lambda: plane.frontend.status() is not None)

        assert {one.essence for one in answers} == {undisturbed.essence}
        assert servers_of(plane.frontend).keys() == NAMES
        assert plane.frontend.status() == 0
        assert not any(is_alive(pid) for pid in pids)

    asyncio.run(scenario())


def test_a_killed_supervisor_leaves_no_process(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)
    pids = children(plane.frontend)

    plane.frontend.kill()

    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    """Whether it runs; one that is dead and not yet reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
