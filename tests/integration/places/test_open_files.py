"""A limit of open files refuses clients with a reason, and keeps room for health checks and sessions with workers.

| workload | nemesis | checker |
| --- | --- | --- |
| 400 clients over HTTP, with probes | soft and hard limit are 256 | each gets a stream or a 503; probes are answered |
| 400 connections over gRPC, with probes | the same | each call has a status; probes are answered |
| a new worker while all room is taken | the same | it is found |
| any | the soft limit is 256, the hard one higher | the soft limit is raised |
"""

import asyncio
import json
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.plane.commands import BARE, Command, Commands, commands, complete, get, wait_served
from tests.integration.harness.waiting import until, wait_until

LIMIT = 256
CLIENTS = 400
SCARCE = ("prlimit", f"--nofile={LIMIT}:{LIMIT}")
SOFT = ("prlimit", f"--nofile={LIMIT}:4096")
SLOW = ("--mocker-itl-ms=20", "--engine-request-limit=512", "--request-queue-limit=512")
BODY = {"model": "mocker", "prompt": "Hi", "max_tokens": 100_000, "stream": True}
PROBE_S_MAX = 30.0
"""Some seconds are the probe's, and the rest is for a busy machine. A probe that finds no room is never answered."""


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Let this process, which has all clients, open enough files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def plane(folder: Path, *options: str) -> Iterator[tuple[Commands, Commands, str, Command]]:
    """A frontend with few descriptors in a plane with many: (plane, starter with few, registry, frontend)."""
    with commands(folder) as plenty, commands(folder, BARE, SCARCE) as scarce:
        registry = plenty.registry()
        plenty.worker(registry, *SLOW)
        frontend = scarce.frontend(registry, *options)
        wait_served(frontend.wait_event("frontend ready")["http"])
        yield plenty, scarce, registry, frontend


async def stream(session: aiohttp.ClientSession, url: str, leave: asyncio.Event) -> str:
    """Ask for a stream; return what came: "stream", or "503" for a refusal of the right form. Leaves a stream late."""
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        if response.status == 200:
            assert (await response.content.readline()).startswith(b"data:")
            await leave.wait()
            return "stream"
        error = (await response.json())["error"]
        assert (error["code"], error["metadata"]["cause"]) == ("OVERLOADED", "connections")
        assert int(response.headers["retry-after"]) >= 1
        return str(response.status)


async def probe(address: str) -> None:
    """Check `/live` and `/health` over new connections."""
    for path in ("/live", "/health"):
        async with asyncio.timeout(PROBE_S_MAX):
            status, _ = await asyncio.to_thread(get, address, path)
        assert status == 200, path


async def crowd(address: str, leave: asyncio.Event) -> "tuple[list[asyncio.Task[str]], aiohttp.ClientSession]":
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
    return [asyncio.create_task(stream(session, f"http://{address}", leave)) for _ in range(CLIENTS)], session


@pytest.mark.parametrize("processes", [1, 2])
def test_each_of_too_many_clients_gets_a_stream_or_a_503_and_probes_are_answered(
    tmp_path: Path, processes: int
) -> None:
    async def scenario(address: str) -> Counter[str]:
        leave = asyncio.Event()
        tasks, session = await crowd(address, leave)
        for _ in range(5):
            await probe(address)
        await until(lambda: sum(not task.done() for task in tasks) < CLIENTS)
        for _ in range(5):
            await probe(address)
        leave.set()
        outcomes = Counter(await asyncio.gather(*tasks))
        await session.close()
        return outcomes

    with plane(tmp_path, f"--processes={processes}") as (_, _, _, frontend):
        address = frontend.wait_event("frontend ready")["http"]
        outcomes = asyncio.run(scenario(address))
        wait_until(lambda: complete(address)[0] == 200)  # There is room again.
        metrics = get(address, "/metrics")[1]

        assert outcomes.keys() <= {"stream", "503"}
        assert outcomes["stream"] >= 100
        assert outcomes["503"] or processes > 1
        refused = re.findall(r'model_rejection_cause_total\{cause="connections",model="unknown"\} (\S+)', metrics)
        assert sum(map(float, refused)) == outcomes["503"]
        assert "Traceback" not in frontend.log
        assert frontend.log.count('"no room for more clients"') <= 2 * processes


def test_worker_that_joins_is_found_while_clients_take_all_room(tmp_path: Path) -> None:
    async def scenario(plenty: Commands, registry: str, frontend: Command) -> None:
        leave = asyncio.Event()
        tasks, session = await crowd(frontend.wait_event("frontend ready")["http"], leave)
        await until(lambda: any(task.done() for task in tasks))
        worker = await asyncio.to_thread(plenty.worker, registry)
        instance = worker.wait_event("worker ready")["instance"]
        await until(lambda: any(line["instance"] == instance for line in frontend.events("worker found")))
        leave.set()
        await asyncio.gather(*tasks)
        await session.close()

    with plane(tmp_path) as (plenty, _, registry, frontend):
        asyncio.run(scenario(plenty, registry, frontend))


def test_each_of_too_many_grpc_clients_gets_a_status_and_probes_are_answered(tmp_path: Path) -> None:
    async def call(address: str, leave: asyncio.Event) -> str:
        options = [*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model="mocker", text="Hi", stop={"max_tokens": 100_000})
            stream = stub.Generate(request, timeout=60)
            try:
                await stream.read()
            except grpc.aio.AioRpcError as error:
                return error.code().name
            await leave.wait()
            stream.cancel()
            return "stream"

    async def scenario(addresses: dict[str, str]) -> Counter[str]:
        leave = asyncio.Event()
        tasks = [asyncio.create_task(call(addresses["grpc"], leave)) for _ in range(CLIENTS)]
        await until(lambda: any(task.done() for task in tasks))
        for _ in range(5):
            await probe(addresses["http"])
        await until(lambda: sum(task.done() for task in tasks) > CLIENTS // 2, 60)
        leave.set()
        return Counter(await asyncio.gather(*tasks))

    with plane(tmp_path) as (_, _, _, frontend):
        addresses = frontend.wait_event("frontend ready")
        outcomes = asyncio.run(scenario(addresses))
        wait_until(lambda: complete(addresses["http"])[0] == 200)  # There is room again, and it is for all.

        assert outcomes.keys() <= {"stream", "UNAVAILABLE"}
        assert outcomes["stream"] >= 40, "on a busy machine, some clients give up connecting after CONNECT_TIMEOUT_MS"
        assert "Traceback" not in frontend.log


def test_soft_limit_is_raised_in_every_process(tmp_path: Path) -> None:
    with commands(tmp_path, BARE, SOFT) as started:
        registry = started.start("registry", "--listen=127.0.0.1:0", "--log-format=json")
        address = registry.wait_event("registry ready")["address"]
        worker = started.worker(address)
        frontend = started.frontend(address, "--processes=2")

        for process in (registry, worker, frontend):
            assert process.wait_event("limit of open files raised")["limit"] == 4096
            limits = Path(f"/proc/{process.process.pid}/limits").read_text()
            assert re.search(r"Max open files\s+4096\s+4096", limits)
        assert frontend.log.count('"limit of open files raised"') == 1, "its processes inherit the limit"


def test_small_plane_works_with_few_descriptors(tmp_path: Path) -> None:
    with commands(tmp_path, BARE, ("prlimit", "--nofile=64:64")) as started:
        registry = started.registry()
        started.worker(registry, "--metrics-port=0")
        answer = json.loads(wait_served(started.frontend(registry).wait_event("frontend ready")["http"]))

        assert answer["choices"]
