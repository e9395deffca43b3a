"""The worker process: an engine, a dispatcher, a gRPC server and a registration, started and stopped in order.

Start: load the engine → listen → register.

Stop (SIGTERM): goaway to all frontends → leave the registry → let requests finish for `drain_timeout_s` → hand over the
rest, which fail with DRAINING and continue on other workers → wait until all frontends have hung up → close.

Death of the engine: goaway → all requests fail with ENGINE_DEAD and continue on other workers → leave the registry →
wait until all frontends have hung up → exit with status 1, so that a supervisor starts another process.

A frontend hangs up once it has read the goaway and none of its streams is left. Until then, requests that it had sent
before may still arrive: they are refused with DRAINING. If the worker closed first, they would be lost.
"""

import asyncio
import json
import random
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from services.core.call import Cause
from services.core.common_layers import Conclude, stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.discovery.client import InstanceRecord
from services.discovery.registrar import Registrar
from services.http.connection_metrics import ConnectionMetrics, TlsMetrics
from services.http.grpc.routes import GrpcRoutes
from services.http.ops_server import ops_server
from services.http.rpc_server import rpc_server
from services.http.server.clients import Clients
from services.rpc.common_services import CommonServices
from services.rpc.inference_service import InferenceService
from services.runtime.address import split_address
from services.runtime.process import StartupError, write_atomically
from services.runtime.tasks import root_cause
from services.stubs import inference_pb2_grpc, worker_pb2_grpc
from services.tls.peers import Door, PeerFiles, peers_with
from services.tls.roles import EVERY_ROLE, Role
from services.worker.dispatcher import Limits
from services.worker.engine import Engine
from services.worker.execute import Execute
from services.worker.listener import SessionListener
from services.worker.metrics import WorkerMetrics
from services.worker.pipeline import worker_layers
from services.worker.service import WorkerService
from services.worker.session import FrontendSessionConfig

log = structlog.get_logger()

HAND_OVER_S = 1.0
"""How long the worker waits for frontends to end the streams that it hands over."""

HANG_UP_S_MAX = 5.0
"""How long a worker without requests waits for frontends to hang up. A later one is stuck, or of an older release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker.

    `advertise`: the address in the registry; None: the address it listens on. Port 0 stands for the real port.
    `session_listen`: the address for frontends' sessions; None: any free port on the host of `listen`. It is advertised
    with the host of `advertise`.

    `engine_request_limit`: N, the number of slots; None: as many requests as the engine can run. `request_queue_limit`:
    Q, the number of places. `queue_timeout_s`: how long a request may wait for a slot. `queue_token_limit`: prompt
    tokens that may wait in all; None: no limit. `lease_s`: how long the registry keeps a silent worker.
    `peers`: the certificate for the other processes of the plane; None: without TLS.
    """

    listen: str = "127.0.0.1:0"
    session_listen: str | None = None
    advertise: str | None = None
    metrics_listen: str | None = None
    registries: tuple[str, ...] = ("127.0.0.1:50050",)
    engine_request_limit: int | None = None
    request_queue_limit: int = 16
    queue_timeout_s: float = 60.0
    queue_token_limit: int | None = None
    drain_timeout_s: float = 30.0
    lease_s: int = 10
    ready_file: Path | None = None
    peers: PeerFiles | None = None
    session: FrontendSessionConfig = field(default_factory=FrontendSessionConfig)


class Worker:
    """One worker, from start to stop."""

    def __init__(self, engine: Engine, config: WorkerConfig) -> None:
        slots = config.engine_request_limit or engine.request_limit
        if slots > engine.request_limit:
            raise StartupError(f"--engine-request-limit {slots} is more than the engine's {engine.request_limit}")
        self._config = config
        self._engine = engine
        self._instance_id = uuid.uuid4().hex[:16]
        limits = Limits(
            slots=slots,
            places=config.request_queue_limit,
            tokens=config.queue_token_limit,
            wait_s=config.queue_timeout_s,
        )
        self._execute = Execute(engine, limits)
        self._gate = Gate()
        self._registrar: Registrar | None = None
        layers = worker_layers(gate=self._gate, card_of=lambda: self._engine.card, rng=random.Random())
        pipeline = stack(*layers, innermost=self._execute)
        self._service = WorkerService(self._instance_id, engine, self._execute, pipeline, config.session)
        self._peers = peers_with(config.peers, Role.WORKER)
        self._rpcs = GrpcRoutes(peers=self._peers)
        self._rpcs.add(
            inference_pb2_grpc.add_InferenceServicer_to_server, InferenceService(Conclude(pipeline), self._gate)
        )
        self._rpcs.add(worker_pb2_grpc.add_WorkerServicer_to_server, self._service)
        self._common = CommonServices(["unbroken.v1.Inference", "unbroken.v1.Worker"])
        self._common.add_to(self._rpcs)
        self._clients: list[Clients] = []
        self._metrics = CollectorRegistry()
        self._metrics.register(WorkerMetrics(self._execute, engine, self._service.generations))
        self._metrics.register(ConnectionMetrics("unbroken_grpc", self._clients))
        if self._peers is not None:
            self._metrics.register(TlsMetrics("unbroken", self._peers.files))

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set and the worker has drained.

        Raises StartupError if the worker cannot start or its engine dies.
        """
        ready = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                watching = [] if self._peers is None else [group.create_task(self._peers.files.run())]
                engine_task = group.create_task(self._run_engine(ready))
                await _either(ready, stopping)
                if not stopping.is_set():
                    await self._serve(stopping)
                for task in (engine_task, *watching):
                    task.cancel()
        except ExceptionGroup as group:
            cause = root_cause(group)
            raise (StartupError(cause.detail) if isinstance(cause, Failure) else cause) from None
        log.info("worker stopped")

    async def _run_engine(self, ready: asyncio.Event) -> None:
        """Run the engine. If it dies, fail all requests at once, so that they continue on other workers."""
        try:
            await self._engine.run(self._execute.emit, ready)
        except Exception as error:
            why = error.detail if isinstance(error, Failure) else error
            log.error("engine died", why=str(why), exc_info=not isinstance(error, Failure))
            death = Failure(Reason.ENGINE_DEAD, f"the engine died: {why}")
            await self._leave_dead(death)
            raise death from error

    async def _leave_dead(self, failure: Failure) -> None:
        self._gate.is_draining = True
        self._service.goaway(0)
        self._execute.fail_all(failure)
        if self._registrar is not None:
            await self._registrar.deregister()  # Otherwise frontends would find it until its lease expires.
        await self._gate.wait_quiet(HAND_OVER_S)
        await self._service.end_sessions(HANG_UP_S_MAX)

    async def _serve(self, stopping: asyncio.Event) -> None:
        await self._common.set_serving(is_serving=False)
        async with (
            self._service.generations,
            rpc_server(self._rpcs, self._config.listen, self._door) as server,
            SessionListener(self._service.attach, self._peers) as listener,
            AsyncExitStack() as ops,
        ):
            self._clients.append(server.context.clients)
            [address] = server.addresses
            session_address = await listener.start(self._config.session_listen or _any_port(self._config.listen))
            record = self._record(address, session_address)
            metrics = None
            if self._config.metrics_listen is not None:
                serving = ops_server(self._config.metrics_listen, self._metrics, self._is_ready)
                metrics = await ops.enter_async_context(serving)
            await self._common.set_serving(is_serving=True)
            self._announce(record, metrics)
            await self._stay_registered(record, stopping)

    @property
    def _door(self) -> Door | None:
        return None if self._peers is None else self._peers.door(EVERY_ROLE)

    def _record(self, address: str, session_address: str) -> InstanceRecord:
        """The record for the registry. `address` and `session_address`: where the worker listens."""
        advertised = _advertised(self._config.advertise, address)
        session_port = split_address(session_address)[1]
        return InstanceRecord(
            self._instance_id,
            advertised,
            self._engine.card.model,
            session_address=f"{split_address(advertised)[0]}:{session_port}",
        )

    def _is_ready(self) -> bool:
        return not self._gate.is_draining

    def _announce(self, record: InstanceRecord, metrics: str | None) -> None:
        card, limits = self._engine.card, self._execute.limits
        log.info(
            "worker ready",
            model=card.model,
            engine=card.engine,
            address=record.address,
            session_address=record.session_address,
            instance=record.instance_id,
            running_max=limits.slots,
            waiting_max=limits.places,
        )
        if self._config.ready_file is not None:
            state = {
                "address": record.address,
                "session_address": record.session_address,
                "instance_id": record.instance_id,
                "metrics": metrics,
            }
            write_atomically(self._config.ready_file, json.dumps(state))

    async def _stay_registered(self, record: InstanceRecord, stopping: asyncio.Event) -> None:
        registrar = Registrar(
            self._config.registries,
            record,
            lease_s=self._config.lease_s,
            on_drain=stopping.set,
            peers=self._peers,
        )
        self._registrar = registrar
        async with asyncio.TaskGroup() as group:
            registration = group.create_task(registrar.run())
            await stopping.wait()
            await self._drain(registrar)
            registration.cancel()

    async def _drain(self, registrar: Registrar) -> None:
        grace_s = self._config.drain_timeout_s
        log.info("draining", running=self._execute.running_count, waiting=self._execute.waiting_count, grace_s=grace_s)
        self._gate.is_draining = True
        self._service.goaway(grace_s)
        await self._common.set_serving(is_serving=False)
        for clients in self._clients:
            clients.drain()
        await registrar.deregister()
        if not await self._gate.wait_quiet(grace_s):
            log.info("handing over", count=self._gate.count)
            left = Failure(Reason.DRAINING, "the worker left before the answer was complete")
            self._execute.fail_all(left, Cause.DRAIN)
            await self._gate.wait_quiet(HAND_OVER_S)
        await self._service.end_sessions(HANG_UP_S_MAX)


def _advertised(wanted: str | None, real: str) -> str:
    """The address for the registry. Port 0 in `wanted` stands for the port of `real`."""
    if wanted is None:
        return real
    host, port = split_address(wanted)
    return wanted if port else f"{host}:{split_address(real)[1]}"


def _any_port(address: str) -> str:
    return f"{split_address(address)[0]}:0"


async def _either(first: asyncio.Event, second: asyncio.Event) -> None:
    """Wait until one of the two events is set."""
    async with asyncio.TaskGroup() as group:
        waits = [group.create_task(event.wait()) for event in (first, second)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
