"""A frontend with several processes acts as one frontend to clients and operators, and each process fails alone.

| workload | nemesis | checker |
| --- | --- | --- |
| requests over many connections | – | both processes serve, and metrics count each request once |
| settings of operators; cancels by request id | the connection may end in either process | they act in both |
| a burst at one worker | N and Q far below | N + Q are admitted |
| streams in both | SIGKILL of one process | the other's streams continue; it restarts with its settings |
| the same | SIGTERM of the supervisor | all streams and all processes end well |
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
from tests.integration.harness.clients.admin import DECODE, get_thresholds, post_threshold
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.client import ENDLESS, Client
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer, answers_under_fault, outcome, run_together
from tests.integration.harness.metrics import read_metrics, wait_idle, wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process, children
from tests.integration.harness.waiting import until, wait_until

OPTIONS = ("--processes=2", "--admission-control=token-capacity")
NAMES = {"frontend-1", "frontend-2"}
CONNECTIONS = 16
"""Each ends in either process. All end in the same process with a probability of 1 in 2^15."""
SLOW = "--mocker-itl-ms=100"


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Iterator[Plane]:
    plane = start_plane(frontend=OPTIONS)
    yield plane
    assert not plane.frontend.events_until_now(level="error")


async def worker_of(plane: Plane, *options: str, model: str = "mocker") -> Process:
    """Start a worker and wait until both processes have found it."""
    worker = plane.launch(*options, f"--served-model-name={model}")
    await until(lambda: worker.is_ready)
    instance = worker.ready["instance_id"]
    await until(lambda: {line["process"] for line in plane.frontend.events("worker found", instance=instance)} == NAMES)
    return worker


def servers_of(frontend: Frontend, **fields: Any) -> Counter[str]:
    """Return how many requests each process has logged."""
    return Counter(line["process"] for line in frontend.events_until_now("request", **fields))


def test_both_processes_serve_and_metrics_count_each_request_once(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, model="shared")
        requests = [Request(PROTOCOLS[number % 3], model="shared", max_tokens=4) for number in range(3 * CONNECTIONS)]
        await run_together(answer(plane.frontend, request) for request in requests)
        await wait_idle(plane.frontend)
        metrics = await read_metrics(plane.frontend)

        assert servers_of(plane.frontend, model="shared").keys() == NAMES
        assert metrics.sum("dynamo_frontend_requests_total", model="shared") == len(requests)
        assert metrics.sum("dynamo_frontend_output_sequence_tokens_sum", model="shared") == 4 * len(requests)
        assert metrics.sum("dynamo_frontend_model_migration_limit", model="shared") == 3, "counted once per process"
        assert metrics.sum("dynamo_frontend_processes") == 2

    asyncio.run(scenario())


def test_threshold_set_in_one_process_applies_in_both(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, SLOW, model="watched")
        frontend, short = plane.frontend, Request(model="watched", max_tokens=2)
        async with asyncio.TaskGroup() as group:
            running = [
                Client(frontend, Request(model="watched", max_tokens=ENDLESS)).start(group) for _ in range(CONNECTIONS)
            ]
            await until(lambda: all(client.has_begun for client in running))
            await post_threshold(frontend, {"model": "watched", DECODE: 0.0})
            listed = [(await get_thresholds(frontend))["watched"] for _ in range(CONNECTIONS)]
            await until(lambda: are_all_refused(frontend, short))  # Once both processes know the worker's load.
            await post_threshold(frontend, {"model": "watched", DECODE: None})
            answered = await run_together(outcome(frontend, short) for _ in range(CONNECTIONS))
            for client in running:
                client.hang_up()

        assert all(one[DECODE] == 0.0 for one in listed)
        assert all(isinstance(one, Answer) for one in answered)
        assert servers_of(frontend, model="watched", outcome="OVERLOADED").keys() == NAMES

    asyncio.run(scenario())


async def are_all_refused(frontend: Frontend, request: Request) -> bool:
    outcomes = await run_together(outcome(frontend, request) for _ in range(CONNECTIONS))
    return all(isinstance(one, Refused) and one.reason == "OVERLOADED" for one in outcomes)


async def cancel(frontend: Frontend, name: str, protocol: str) -> int:
    """Cancel by request id over the protocol; return how many requests this ended."""
    if protocol == "grpc":
        async with grpc.aio.insecure_channel(frontend.grpc, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            return int((await stub.Cancel(inference_pb2.CancelRequest(request_id=name))).cancelled)
    url = f"{frontend.http}/v1/requests/{name}/cancel"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return int((await response.json())["cancelled"])


def test_request_is_cancelled_by_id_in_whichever_process_serves_it(plane: Plane) -> None:
    async def scenario() -> None:
        await worker_of(plane, SLOW, model="cancelled")
        requests = [
            Request(PROTOCOLS[number % 2], model="cancelled", max_tokens=ENDLESS) for number in range(CONNECTIONS)
        ]
        async with asyncio.TaskGroup() as group:
            clients = [
                Client(plane.frontend, request.named(f"c{number}")).start(group)
                for number, request in enumerate(requests)
            ]
            await until(lambda: all(client.has_begun for client in clients))
            counts = [
                await cancel(plane.frontend, f"c{number}", PROTOCOLS[number // 2 % 2])
                for number in range(len(requests))
            ]
            refusals = [await client.refusal() for client in clients]

        assert counts == [1] * len(requests)
        assert {refusal.reason for refusal in refusals} == {"CANCELLED"}
        assert servers_of(plane.frontend, model="cancelled").keys() == NAMES

    asyncio.run(scenario())


def test_burst_fills_exactly_the_slots_and_the_queue(plane: Plane) -> None:
    slots, places, burst = 2, 3, 40

    async def scenario() -> None:
        limits = (f"--engine-request-limit={slots}", f"--request-queue-limit={places}")
        worker = await worker_of(plane, SLOW, *limits, model="small")
        async with asyncio.TaskGroup() as group:
            clients = [
                Client(plane.frontend, Request(PROTOCOLS[number % 3], model="small", max_tokens=ENDLESS)).start(group)
                for number in range(burst)
            ]
            await until(lambda: sum(client.is_refused for client in clients) == burst - slots - places)
            await wait_load(worker, slots, places)
            for client in clients:
                client.hang_up()
        await wait_idle(worker, plane.frontend)

    asyncio.run(scenario())


# How processes end


async def answer_or_none(frontend: Frontend, request: Request) -> Answer | None:
    """Return the answer; None if the connection ended before it was complete."""
    try:
        return await answer(frontend, request)
    except aiohttp.ClientError:
        return None
    except Refused as refused:
        if refused.code == "UNAVAILABLE":
            return None
        raise


def test_killed_process_loses_only_its_own_streams_and_restarts_with_its_settings(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)

    async def scenario() -> None:
        await worker_of(plane, SLOW)
        frontend = plane.frontend
        requests = [Request(PROTOCOLS[number % 2], max_tokens=40) for number in range(CONNECTIONS)]
        await post_threshold(frontend, {"model": "mocker", DECODE: 0.9})
        undisturbed = await answer(frontend, requests[1])
        before = await frontend.metric("dynamo_frontend_requests_total")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer_or_none(frontend, request)) for request in requests]
            await until(lambda: has_inflight(frontend, CONNECTIONS))
            victim = children(frontend)[0]
            os.kill(victim, SIGKILL)
        answers = [task.result() for task in tasks]
        await until(lambda: has_processes(frontend, 2))

        complete = [one.essence for one in answers if one is not None]
        assert 0 < len(complete) < CONNECTIONS
        assert set(complete) == {undisturbed.essence}
        assert victim not in children(frontend)
        thresholds = [(await get_thresholds(frontend))["mocker"] for _ in range(CONNECTIONS)]
        assert all(one[DECODE] == 0.9 for one in thresholds), "a restarted process lacks the settings"
        served = servers_of(frontend)
        await run_together(answer(frontend, request) for request in requests)
        assert (servers_of(frontend) - served).keys() == NAMES
        await wait_idle(frontend)
        counted = await frontend.metric("dynamo_frontend_requests_total")
        assert counted == before + len(complete) + CONNECTIONS, "the counts of a process that died are lost"
        assert not frontend.events_until_now(outcome="NO_WORKERS"), "a process accepted clients before it had workers"
        assert not frontend.events_until_now(level="error")

    asyncio.run(scenario())


async def has_inflight(frontend: Frontend, count: int) -> bool:
    return await frontend.metric("dynamo_frontend_inflight_requests") == count


async def has_processes(frontend: Frontend, count: int) -> bool:
    return await frontend.metric("dynamo_frontend_processes") == count


def test_sigterm_lets_the_streams_of_all_processes_finish(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)

    async def scenario() -> None:
        await worker_of(plane, SLOW)
        requests = [Request(PROTOCOLS[number % 2], max_tokens=40) for number in range(CONNECTIONS)]
        pids = children(plane.frontend)
        undisturbed = await answer(plane.frontend, requests[1])

        async def terminate() -> None:
            plane.frontend.signal(SIGTERM)

        answers = await answers_under_fault(plane.frontend, requests, terminate)
        await until(lambda: plane.frontend.status() is not None)

        assert {one.essence for one in answers} == {undisturbed.essence}
        assert servers_of(plane.frontend).keys() == NAMES
        assert plane.frontend.status() == 0
        assert not any(is_alive(pid) for pid in pids)

    asyncio.run(scenario())


def test_killed_supervisor_leaves_no_process_behind(start_plane: Start) -> None:
    plane = start_plane(frontend=OPTIONS)
    pids = children(plane.frontend)

    plane.frontend.kill()

    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
