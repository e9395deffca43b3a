"""The worker process: it starts and stops in order, and says in one sentence why if it cannot."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from services.core.call import Cause, Phase
from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.http.h2.wire.frames import GOAWAY
from services.registry.memory_store import MemoryStore
from services.rpc.status import CHANNEL_OPTIONS, failure_of
from services.runtime.process import StartupError
from services.stubs import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.worker import server
from services.worker.engine import Emit
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.server import Worker, WorkerConfig
from tests.http.h2.support import Listener
from tests.registry.support import running, served, until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.support.manual_worker import ManualEngine, RawFrontend, submit

NO_REGISTRY = "127.0.0.1:1"


def generate_request(max_tokens: int = 40, **fields: Any) -> inference_pb2.GenerateRequest:
    stop = inference_pb2.Stop(max_tokens=max_tokens, ignore_eos=True)
    given: dict[str, Any] = {"model": "mocker", "tokens": inference_pb2.TokenIds(ids=[1, 2]), "stop": stop} | fields
    return inference_pb2.GenerateRequest(**given)


class Answer:
    """One Generate call; the test reads its items."""

    def __init__(self, channel: grpc.aio.Channel, request: inference_pb2.GenerateRequest | None = None) -> None:
        self._call = inference_pb2_grpc.InferenceStub(channel).Generate(request or generate_request())
        self.items: list[Any] = []
        self.failure: Failure | None = None

    @property
    def token_count(self) -> int:
        return sum(len(item.delta.token_ids) for item in self.items)

    @property
    def is_complete(self) -> bool:
        return bool(self.items) and self.items[-1].complete_final

    async def read(self) -> bool:
        """Read one item. Returns False at the end."""
        try:
            item = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.failure = failure_of(error, otherwise=Reason.DISCONNECTED)
            return False
        if item is grpc.aio.EOF:
            return False
        self.items.append(item)
        return True

    async def read_all(self) -> "Answer":
        while await self.read():
            pass
        return self

    @property
    def reason(self) -> Reason | None:
        return None if self.failure is None else self.failure.reason


async def until_written(path: Path, process: subprocess.Popen[str] | None = None) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while (ready := _ready_state(path)) is None:
            assert process is None or process.poll() is None, "the worker ended before it was ready"
            await asyncio.sleep(0.01)
    return ready


def _ready_state(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    state: dict[str, Any] = json.loads(path.read_text())
    return state


class Process:
    """A real `unbroken worker`, and a channel to it."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._ready_file = folder / "ready.json"
        command = [sys.executable, "-m", "services", "worker", "--registry", NO_REGISTRY]
        command += ["--ready-file", str(self._ready_file), *options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}
        self._frontends: list[RawFrontend] = []
        self._popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)

    async def ready(self) -> dict[str, Any]:
        return await until_written(self._ready_file, self._popen)

    async def attach(self) -> RawFrontend:
        """Open a session. It is closed with the process at the latest."""
        self._frontends.append(RawFrontend((await self.ready())["session_address"]))
        return self._frontends[-1]

    def terminate(self) -> None:
        self._popen.send_signal(signal.SIGTERM)

    async def end(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit status and standard error."""
        _, stderr = await asyncio.to_thread(self._popen.communicate, timeout=WAIT_S)
        return self._popen.returncode, stderr

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.close()
        self._popen.kill()
        self._popen.communicate()


@asynccontextmanager
async def started(folder: Path, *options: str) -> AsyncIterator[tuple[Process, grpc.aio.Channel]]:
    process = Process(folder, *options)
    try:
        address = (await process.ready())["address"]
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            yield process, channel
    finally:
        process.close()


# Real processes


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async def scenario() -> tuple[Answer, Reason | None, tuple[int, str], list[int]]:
        async with started(tmp_path, "--mocker-itl-ms", "10") as (process, channel):
            health = health_pb2_grpc.HealthStub(channel)
            states = [(await health.Check(health_pb2.HealthCheckRequest())).status]
            frontend = await process.attach()
            answer = Answer(channel)
            await answer.read()
            process.terminate()
            await frontend.until(lambda: frontend.messages and frontend.messages[-1].HasField("goaway"))
            late = await Answer(channel).read_all()
            states.append((await health.Check(health_pb2.HealthCheckRequest())).status)
            await answer.read_all()
            frontend.close()
            return answer, late.reason, await process.end(), states

    answer, late, (status, stderr), states = run_async(scenario())

    assert (answer.token_count, answer.is_complete) == (40, True)
    assert late is Reason.DRAINING
    assert states == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]
    assert status == 0
    assert stderr.count("worker stopped") == 1


def test_requests_that_exceed_the_drain_timeout_are_handed_over(tmp_path: Path) -> None:
    async def scenario() -> tuple[Answer, str, tuple[int, str]]:
        options = ("--served-model-name", "m", "--mocker-itl-ms", "5", "--drain-timeout", "0.2")
        async with started(tmp_path, *options) as (process, channel):
            frontend = await process.attach()
            request = generate_request(max_tokens=10_000, model="m")
            await frontend.send(submit(1, 3, stop=request.stop))
            answer = Answer(channel, request)
            await answer.read()
            process.terminate()
            end = await frontend.until(lambda: frontend.end(1))
            await answer.read_all()
            frontend.close()
            return answer, end.error.reason, await process.end()

    answer, reason, (status, _) = run_async(scenario())

    assert (answer.reason, reason, status) == (Reason.DRAINING, "DRAINING", 0)
    assert 0 < answer.token_count < 10_000


def test_sigterm_while_the_engine_loads_ends_the_process_at_once(tmp_path: Path) -> None:
    async def scenario() -> int:
        process = Process(tmp_path, "--mocker-startup-s", "600", "--log-format", "json")
        try:
            await asyncio.to_thread(_wait_for_loop, process._popen.pid)
            process.terminate()
            return (await process.end())[0]
        finally:
            process.close()

    assert run_async(scenario()) == 0


def _wait_for_loop(pid: int) -> None:
    """Wait until the process has a handler for SIGTERM, according to /proc."""
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        if int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.01)


def test_port_in_use_ends_the_process_with_a_clear_message(tmp_path: Path) -> None:
    async def scenario() -> tuple[int, str]:
        async with started(tmp_path):
            address = (await until_written(tmp_path / "ready.json"))["address"]
            (tmp_path / "second").mkdir()
            second = Process(tmp_path / "second", "--listen", address)
            try:
                return await second.end()
            finally:
                second.close()

    status, stderr = run_async(scenario())

    assert status == 1
    assert stderr.splitlines()[-1].startswith("error: cannot listen for gRPC on 127.0.0.1:")
    assert "Traceback" not in stderr


DYING = """
import asyncio
from services.core.errors import Failure, Reason
from services.runtime.process import run_process
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.server import Worker, WorkerConfig

class Dying(MockerEngine):
    async def run(self, emit, ready):
        ready.set()
        await asyncio.sleep(0.1)
        raise Failure(Reason.ENGINE_DEAD, "the device is gone")

config = WorkerConfig(registries=("127.0.0.1:1",))
run_process(lambda stopping: Worker(Dying(MockerConfig()), config).run(stopping))
"""


def test_dead_engine_ends_the_process_with_status_1_and_a_clear_message() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=WAIT_S, check=False)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: the engine died: the device is gone"


# In this process


class DyingEngine(ManualEngine):
    """An engine that dies when `death` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.death = asyncio.Event()

    async def run(self, emit: Emit, ready: asyncio.Event) -> None:
        self.attach(emit)
        ready.set()
        await self.death.wait()
        raise ZeroDivisionError("boom")


def test_dead_engine_fails_all_requests_with_engine_dead_before_the_process_ends(tmp_path: Path) -> None:
    async def scenario() -> tuple[Reason | None, str, str]:
        engine = DyingEngine()
        config = WorkerConfig(registries=(NO_REGISTRY,), ready_file=tmp_path / "r")
        death = None

        async def run() -> None:
            nonlocal death
            try:
                await Worker(engine, config).run(asyncio.Event())
            except StartupError as error:
                death = str(error)

        async with asyncio.TaskGroup() as group:
            group.create_task(run())
            ready = await until_written(tmp_path / "r")
            async with (
                grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
                RawFrontend(ready["session_address"]) as frontend,
            ):
                await frontend.send(submit(1, 10))
                answer = Answer(channel, generate_request(model="m"))
                reading = group.create_task(answer.read_all())
                async with asyncio.timeout(WAIT_S):
                    while len(engine.requests) < 2:
                        await frontend.read()
                engine.death.set()
                end = await frontend.until(lambda: frontend.end(1))
                await reading
        assert death is not None
        return answer.reason, end.error.reason, death

    assert run_async(scenario()) == (Reason.ENGINE_DEAD, "ENGINE_DEAD", "the engine died: boom")


def test_worker_with_a_dead_engine_leaves_the_registry_before_its_lease_expires() -> None:
    async def scenario() -> None:
        store, engine = MemoryStore(), DyingEngine()
        async with running(store), served(store) as registry:
            worker = Worker(engine, WorkerConfig(registries=(registry,), lease_s=300))
            async with asyncio.TaskGroup() as group:
                ended = group.create_task(_to_its_end(worker))
                await until(lambda: len(store.cache.instances()) == 1)
                engine.death.set()
                await until(lambda: not store.cache.instances())
                assert await ended == "the engine died: boom"

    run_async(scenario())


async def _to_its_end(worker: Worker) -> str:
    with pytest.raises(StartupError) as caught:
        await worker.run(asyncio.Event())
    return str(caught.value)


@asynccontextmanager
async def working(engine: Any, folder: Path, **config: Any) -> AsyncIterator[dict[str, Any]]:
    """Run a worker in this process. It is stopped in order, at the latest when the context exits."""
    stopping = asyncio.Event()
    worker = Worker(engine, WorkerConfig(registries=(NO_REGISTRY,), ready_file=folder / "r", **config))
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.run(stopping))
        yield {**await until_written(folder / "r"), "stopping": stopping, "worker": worker}
        stopping.set()


# Leaving


def test_leaving_worker_tells_its_clients_over_grpc_in_two_steps(tmp_path: Path) -> None:
    """As a frontend does. Bug: their connections just ended."""

    async def scenario() -> list[int]:
        async with working(ManualEngine(), tmp_path) as worker:
            listener = await Listener.at(worker["address"])
            worker["stopping"].set()
            return await listener.kinds_until_closed()

    assert run_async(scenario()).count(GOAWAY) == 2


def test_leaving_worker_refuses_a_request_that_was_on_its_way_instead_of_losing_it(tmp_path: Path) -> None:
    """A bug: a worker closed its sessions as soon as it had no request. Requests that frontends had sent before they
    read the goaway were lost, and counted as failures of the worker."""

    async def scenario() -> tuple[str, bool]:
        async with working(ManualEngine(), tmp_path) as worker, RawFrontend(worker["session_address"]) as frontend:
            await frontend.read()
            worker["stopping"].set()
            await frontend.until(lambda: frontend.messages[-1].HasField("goaway"))
            await frontend.send(submit(1, 10))
            end = await frontend.until(lambda: frontend.end(1))
            return end.error.reason, frontend.is_over

    assert run_async(scenario()) == ("DRAINING", False)


def test_worker_with_a_dead_engine_refuses_a_request_that_was_on_its_way(tmp_path: Path) -> None:
    async def scenario() -> str:
        engine = DyingEngine()
        config = WorkerConfig(registries=(NO_REGISTRY,), ready_file=tmp_path / "r")
        async with asyncio.TaskGroup() as group:
            group.create_task(_to_its_end(Worker(engine, config)))
            ready = await until_written(tmp_path / "r")
            async with RawFrontend(ready["session_address"]) as frontend:
                await frontend.read()
                engine.death.set()
                await frontend.until(lambda: frontend.messages[-1].HasField("goaway"))
                await frontend.send(submit(1, 10))
                end = await frontend.until(lambda: frontend.end(1))
        return str(end.error.reason)

    assert run_async(scenario()) == "DRAINING"


def test_leaving_worker_waits_no_longer_than_the_bound_for_a_frontend_that_does_not_hang_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANG_UP_S_MAX", 0.01)

    async def scenario() -> None:
        async with working(ManualEngine(), tmp_path) as worker, RawFrontend(worker["session_address"]) as frontend:
            await frontend.read()
            worker["stopping"].set()
            await frontend.until_over()

    with capture_logs() as logs:
        run_async(scenario())

    assert [(line["sessions"], line["waited_s"]) for line in logs if line["event"] == "frontends have not hung up"] == [
        (1, 0.01)
    ]


@pytest.mark.parametrize("places", [0, 1, 3])
def test_exactly_n_plus_q_of_fifty_simultaneous_requests_are_served(places: int, tmp_path: Path) -> None:
    async def scenario() -> list[Answer]:
        engine = ManualEngine()
        async with (
            working(engine, tmp_path, engine_request_limit=2, request_queue_limit=places) as ready,
            grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
            asyncio.TaskGroup() as group,
        ):
            answers = [Answer(channel, generate_request(model="m")) for _ in range(50)]
            reading = {group.create_task(answer.read_all()) for answer in answers}
            while len(reading) > 2 + places:  # No request finishes before the others are refused.
                _, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            while reading:
                for key in list(engine.requests):
                    engine.give(key, [7], FinishReason.STOP)
                _, reading = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
        assert engine.running_count_max == 2
        return answers

    answers = run_async(scenario())

    assert sum(answer.reason is Reason.WORKER_AT_CAPACITY for answer in answers) == 50 - 2 - places
    assert sum(answer.is_complete for answer in answers) == 2 + places


def test_worker_applies_the_configured_queue_limits(tmp_path: Path) -> None:
    """--queue-timeout and --queue-token-limit; the test above covers the limits on requests."""

    async def scenario() -> list[Answer]:
        engine = ManualEngine()
        limits = {"engine_request_limit": 1, "queue_timeout_s": 0.05, "queue_token_limit": 2}
        async with (
            working(engine, tmp_path, **limits) as ready,
            grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
            asyncio.TaskGroup() as group,
        ):
            first = group.create_task(Answer(channel, generate_request(model="m")).read_all())
            await engine.wait_submitted(1)
            longer = inference_pb2.TokenIds(ids=[1, 2, 3])
            refused = await Answer(channel, generate_request(model="m", tokens=longer)).read_all()
            expired = await Answer(channel, generate_request(model="m")).read_all()
            engine.give(next(iter(engine.requests)), [7], FinishReason.STOP)
            return [await first, refused, expired]

    first, refused, expired = run_async(scenario())

    assert first.is_complete
    assert refused.failure is not None
    assert expired.failure is not None
    assert "prompt tokens" in refused.failure.detail
    assert "waited 0.05 s" in expired.failure.detail
    assert refused.failure.metadata["queue_token_limit"] == "2"
    assert expired.failure.metadata["queue_timeout_s"] == "0.05"
    assert expired.failure.metadata["engine_request_limit"] == "1"


def test_health_and_admin_calls_work_on_a_worker_without_a_free_slot(tmp_path: Path) -> None:
    async def scenario() -> tuple[list[Any], int]:
        engine = ManualEngine()
        async with (
            working(engine, tmp_path, engine_request_limit=1, request_queue_limit=0, drain_timeout_s=0.0) as ready,
            grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
            RawFrontend(ready["session_address"]) as running,
            RawFrontend(ready["session_address"]) as late,
        ):
            health, worker = health_pb2_grpc.HealthStub(channel), worker_pb2_grpc.WorkerStub(channel)
            inference = inference_pb2_grpc.InferenceStub(channel)
            await running.send(submit(1, 10))
            await engine.wait_submitted(1)
            seen = [(await health.Check(health_pb2.HealthCheckRequest())).status]
            await late.read()
            seen.append((late.messages[0].load.running, late.messages[0].load.waiting))
            seen += [piece async for piece in worker.FetchTokenizer(worker_pb2.FetchTokenizerRequest())]
            seen.append((await inference.Cancel(inference_pb2.CancelRequest(request_id="nobody"))).cancelled)
            assert (await Answer(channel, generate_request(model="m")).read_all()).reason is Reason.WORKER_AT_CAPACITY
            ready["stopping"].set()
            end = await running.until(lambda: running.end(1))
        assert end.error.reason == "DRAINING"
        assert ready["worker"]._execute.counters.cancelled == {(Cause.DRAIN, Phase.PREFILL): 1}
        return seen, len(engine.submitted)

    seen, submitted = run_async(scenario())

    assert seen == [health_pb2.HealthCheckResponse.SERVING, (1, 0), 0]
    assert submitted == 1


def test_invalid_request_fails_without_affecting_others(tmp_path: Path) -> None:
    """A request without limits once crashed the engine."""

    async def scenario() -> list[Answer]:
        async with (
            working(MockerEngine(MockerConfig(itl_ms=1, context_length=64)), tmp_path) as ready,
            grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
        ):
            requests = [
                inference_pb2.GenerateRequest(model="mocker", text="hi"),
                inference_pb2.GenerateRequest(model="mocker", tokens=inference_pb2.TokenIds(ids=[9999])),
                inference_pb2.GenerateRequest(model="mocker", tokens=inference_pb2.TokenIds(ids=[1])),
            ]
            return [await Answer(channel, request).read_all() for request in requests]

    text, outside, bare = run_async(scenario())

    assert (text.reason, outside.reason) == (Reason.INVALID_ARGUMENT, Reason.INVALID_ARGUMENT)
    assert bare.is_complete
    assert bare.token_count <= 63


def test_bug_below_the_guard_is_an_internal_failure_and_frees_the_slot(tmp_path: Path) -> None:
    async def scenario() -> list[Reason | None]:
        engine = ManualEngine()
        async with (
            working(engine, tmp_path, engine_request_limit=1, request_queue_limit=0) as ready,
            grpc.aio.insecure_channel(ready["address"], options=CHANNEL_OPTIONS) as channel,
        ):
            reasons = []
            for _ in range(2):
                engine.refusal, engine.cancel_bug = Failure(Reason.ENGINE_ERROR, "x"), ZeroDivisionError("a bug")
                reasons.append((await Answer(channel, generate_request(model="m")).read_all()).reason)
            return reasons

    assert run_async(scenario()) == [Reason.INTERNAL] * 2


def test_metrics_and_health_are_served_on_the_configured_address(tmp_path: Path) -> None:
    async def scenario() -> tuple[str, str]:
        async with working(ManualEngine(), tmp_path, metrics_listen="127.0.0.1:0") as ready:
            import aiohttp

            async with aiohttp.ClientSession(f"http://{ready['metrics']}") as client:
                async with client.get("/health") as response:
                    health = await response.text()
                async with client.get("/metrics") as response:
                    return health, await response.text()

    health, metrics = run_async(scenario())

    assert "ready" in health
    for line in ("dynamo_engine_request 0.0", "dynamo_request_queue 0.0", "unbroken_engine_steps_total 7.0"):
        assert line in metrics
    assert "dynamo_rejection_request_total 0.0" in metrics


def test_advertised_address_is_the_configured_one_or_the_listening_one(tmp_path: Path) -> None:
    async def scenario(**config: Any) -> str:
        async with working(ManualEngine(), tmp_path, **config) as ready:
            address: str = ready["address"]
            return address

    assert run_async(scenario()).startswith("127.0.0.1:")
    (tmp_path / "r").unlink()
    assert run_async(scenario(advertise="worker-1:50052")) == "worker-1:50052"
    (tmp_path / "r").unlink()
    assert re.fullmatch(r"worker-1:[1-9]\d*", run_async(scenario(advertise="worker-1:0"))), (
        "port 0 stands for the real port"
    )


def test_more_slots_than_the_engine_supports_are_refused_with_a_clear_message() -> None:
    with pytest.raises(StartupError, match="--engine-request-limit 3 is more than the engine's 2"):
        Worker(ManualEngine(request_limit=2), WorkerConfig(engine_request_limit=3))
