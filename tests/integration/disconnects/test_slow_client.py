"""A client that reads slowly, or not at all, affects no other client, and its own cost is bounded.

| workload | nemesis | checker |
| --- | --- | --- |
| fast streams beside others | clients that read late | all answers undisturbed, the late ones in larger pieces |
| | one that never reads | cut at the bound in bytes, and counted |
| a stream without end | its client never reads | cut in time, and counted |
| several of these | the same | each cut at the bound in bytes; the frontend grows no larger than that |
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Events, Items
from tests.integration.harness.clients.requests import (
    REQUEST_S_MAX,
    Request,
    grpc_message,
    headers_of,
    json_body,
    path_of,
)
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

MIB = 1 << 20
PATIENT = "--client-stall-timeout=600"
"""Longer than any machine takes for a complete answer."""
FAST = Request(max_tokens=300)
LONG = Request(n=8, max_tokens=1200, logprobs=20)
"""Several MB of events: more than two kernels buffer for a client that does not read."""
LONG_BYTES_MAX = 24 * MIB
"""The answer counts half of that."""
ENDLESS = replace(LONG, max_tokens=7000)
"""The answer counts three times that, and takes the engine at least 14 s."""
RECEIVE_BYTES = 8 * 1024
SMALL_WINDOW = ("grpc.http2.bdp_probe", 0)
"""Disables the growth of gRPC's window, which would otherwise hold the whole answer."""


@asynccontextmanager
async def opened(frontend: Frontend, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
    """Open a response that has begun and that nothing reads, on a connection with a small window."""

    def small_socket(info: Any) -> socket.socket:
        one = socket.socket(*info[:3])
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        return one

    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    connector = aiohttp.TCPConnector(socket_factory=small_socket)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        session.post(
            f"{frontend.http}{path_of(request)}", json=json_body(request), headers=headers_of(request)
        ) as response,
    ):
        yield response


def widen_window(response: aiohttp.ClientResponse) -> None:
    """Let the response be read at full speed: several MB through a window of a few kB can take a minute."""
    assert response.connection is not None
    assert response.connection.transport is not None
    sock = response.connection.transport.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)


async def outcome_of(frontend: Frontend, request_id: str) -> str:
    """Wait until the frontend logs the end of the request; return the logged outcome."""
    (entry,) = await until(lambda: frontend.events("request", request_id=request_id), REQUEST_S_MAX)
    return str(entry["outcome"])


async def read_late(frontend: Frontend, request: Request, may_read: asyncio.Event) -> tuple[Answer, int]:
    """Read the answer once the engine is done with it; return it with the number of its events or messages.

    The answer is read at full speed and parsed afterwards, because the time to read the rest of it is bounded.
    """
    counts: list[int] = []
    if request.protocol == "stream":
        async with opened(frontend, request) as response:
            await outcome_of(frontend, request.request_id)
            await may_read.wait()
            widen_window(response)
            return Events(request, counts.append).take(await response.read()), len(counts)
    read: list[inference_pb2.GenerateResponse] = []
    async with grpc.aio.insecure_channel(frontend.grpc, options=[*CHANNEL_OPTIONS, SMALL_WINDOW]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(grpc_message(request), timeout=REQUEST_S_MAX)
        await call.initial_metadata()
        await outcome_of(frontend, request.request_id)
        await may_read.wait()
        while isinstance(item := await call.read(), inference_pb2.GenerateResponse):
            read.append(item)
    items = Items(request, counts.append)
    for item in read:
        items.take(item)
    return items.answer(), len(counts)


async def is_idle(frontend: Frontend, worker: Process) -> bool:
    inflight = await frontend.metric("dynamo_frontend_inflight_requests")
    return not inflight and not await worker.metric("dynamo_engine_request")


async def cut_count(frontend: Frontend) -> float:
    return await frontend.metric("dynamo_frontend_model_cancellation_total", cause="slow_client")


def resident_bytes(process: Process) -> int:
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * 4096


def test_late_readers_get_everything_and_a_client_that_never_reads_is_cut(start_plane: Start) -> None:
    async def scenario() -> None:
        plane = start_plane(frontend=(f"--client-buffer-max={LONG_BYTES_MAX}", PATIENT))
        frontend, worker = plane.frontend, await plane.worker("--mocker-itl-ms=2")
        requests = [replace(request, protocol=protocol) for request in (FAST, LONG) for protocol in ("stream", "grpc")]
        expected = await run_together(answer(frontend, request) for request in requests)
        may_read = asyncio.Event()
        async with opened(frontend, ENDLESS.named("never-reads")), asyncio.TaskGroup() as group:
            late = [
                group.create_task(read_late(frontend, request.named(f"late-{request.protocol}"), may_read))
                for request in requests[2:]
            ]
            assert await run_together(answer(frontend, request) for request in requests[:2]) == expected[:2], (
                "while no other client reads"
            )
            may_read.set()
            for task, whole in zip(late, expected[2:], strict=True):
                read, event_count = await task
                assert read == whole
                assert event_count < LONG.n * LONG.max_tokens * 0.9, "unread tokens did not come in larger pieces"
            assert await outcome_of(frontend, "never-reads") == "SLOW_CLIENT"
        await until(lambda: is_idle(frontend, worker))
        assert await cut_count(frontend) == 1
        assert len(frontend.events_until_now("client cut")) == 1

    asyncio.run(scenario())


def test_client_that_never_reads_is_cut_after_the_stall_timeout(start_plane: Start) -> None:
    async def scenario() -> None:
        plane = start_plane(frontend=(f"--client-buffer-max={1 << 30}", "--client-stall-timeout=1"))
        frontend, worker = plane.frontend, await plane.worker("--mocker-itl-ms=2")
        async with opened(frontend, ENDLESS.named("never-reads")):
            assert await outcome_of(frontend, "never-reads") == "SLOW_CLIENT"
        await until(lambda: is_idle(frontend, worker))
        assert await cut_count(frontend) == 1

    asyncio.run(scenario())


OWN_BYTES = 8 * MIB
"""Other growth of the process: a late event loop reads more at a time, and malloc keeps that memory."""


def test_memory_for_unread_streams_is_bounded(start_plane: Start) -> None:
    silent_count, bound = 8, MIB // 4

    async def scenario() -> None:
        plane = start_plane(frontend=(f"--client-buffer-max={bound}",))
        frontend, worker = plane.frontend, await plane.worker("--mocker-itl-ms=2")
        await answer(frontend, LONG)  # Allocates what the first request needs, which is not measured here.
        before = resident_bytes(frontend)
        async with AsyncExitStack() as clients:
            for number in range(silent_count):
                await clients.enter_async_context(opened(frontend, ENDLESS.named(f"never-reads-{number}")))
            outcomes = [await outcome_of(frontend, f"never-reads-{number}") for number in range(silent_count)]
            grown = resident_bytes(frontend) - before
        assert outcomes == ["SLOW_CLIENT"] * silent_count
        assert grown < 4 * silent_count * bound + OWN_BYTES, f"{grown / MIB:.1f} MiB"
        await until(lambda: is_idle(frontend, worker))
        assert await cut_count(frontend) == silent_count

    asyncio.run(scenario())
