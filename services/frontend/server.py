"""The frontend process: discovery, sessions, the pipeline, gRPC and HTTP, started and ended in order.

End (SIGTERM): not ready → new requests are refused → streams finish within `drain_timeout_s` → what is left fails with
DRAINING, as its clients are told → close.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from services.card import ModelCard
from services.discovery import Watcher
from services.errors import Failure, Reason
from services.frontend.busy import AdmissionConfig, BusyThresholds
from services.frontend.catalogue import Catalogue
from services.frontend.http import HttpConfig, build_app, start_http
from services.frontend.metrics import PREFIX, build_metrics
from services.frontend.observe import observe_refused
from services.frontend.pipeline import PipelineConfig, frontend_layers
from services.frontend.pool import Pool, PoolConfig
from services.frontend.transport import Transport
from services.frontend.worker_metrics import WorkerMetrics
from services.generate import InferenceService
from services.grpc_server import GrpcServer
from services.layers import Gate, stack
from services.lifetime import write_atomically
from services.listening import split_listen
from services.stubs import inference_pb2_grpc

log = structlog.get_logger()

LEAVE_S = 1.0
"""How long streams that are ended at the end of the drain may take to leave the pipeline. Their clients then still have
the grace of both servers to be told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """listen: where HTTP admin calls are answered, grpc_listen: those over gRPC; None: where those of clients are.

    token: what each call must bring; None: nothing. is_on: False where there is to be no admin API at all.
    """

    listen: str | None = None
    grpc_listen: str | None = None
    token: str | None = field(default=None, repr=False)
    is_on: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """drain_timeout_s: how long streams may go on after SIGTERM."""

    grpc_listen: str = "127.0.0.1:50051"
    http_listen: str = "127.0.0.1:8000"
    registries: tuple[str, ...] = ("127.0.0.1:50050",)
    drain_timeout_s: float = 30.0
    metrics_prefix: str = PREFIX
    ready_file: Path | None = None
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)


class _Served:
    """What the HTTP side asks about this frontend."""

    def __init__(self, catalogue: Catalogue, pool: Pool, gate: Gate) -> None:
        self._catalogue = catalogue
        self._pool = pool
        self._gate = gate

    def models(self) -> Sequence[ModelCard]:
        return self._pool.served_cards()

    def token_bytes_of(self, model: str) -> Sequence[bytes]:
        return self._catalogue.find(model).tokenizer.token_bytes

    def cancel(self, request_id: str) -> int:
        return self._gate.cancel(request_id)

    @property
    def is_draining(self) -> bool:
        return self._gate.is_draining


class Frontend:
    """One frontend, from start to end."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._gate = Gate()
        metrics = build_metrics(config.metrics_prefix)
        catalogue = Catalogue()
        self._pool = Pool(catalogue, config.pool)
        self._busy = BusyThresholds(config.admission)
        metrics.registry.register(WorkerMetrics(self._pool, config.metrics_prefix))
        layers = frontend_layers(
            config.pipeline,
            catalogue=catalogue,
            pool=self._pool,
            busy=self._busy,
            metrics=metrics,
            gate=self._gate,
            rng=random.Random(),
        )
        pipeline = stack(*layers, innermost=Transport(self._pool))
        served = _Served(catalogue, self._pool, self._gate)
        on_refused = partial(observe_refused, metrics)
        self._app = build_app(pipeline, served, metrics.registry, config.http, on_refused)
        self._server = GrpcServer(["unbroken.v1.Inference"])
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(pipeline, self._gate, on_refused), self._server.server
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and all is drained. Raises StartupError when it can't start."""
        host, port = split_listen(self._config.http_listen)
        async with self._server:
            grpc_address = await self._server.start(self._config.grpc_listen)
            runner, http_port = await start_http(self._app, host, port)
            try:
                self._announce(grpc_address, f"{host}:{http_port}")
                await self._serve(stopping)
            finally:
                await runner.cleanup()

    def _announce(self, grpc_address: str, http_address: str) -> None:
        log.info("frontend ready", grpc=grpc_address, http=http_address)
        if self._config.ready_file is not None:
            write_atomically(self._config.ready_file, json.dumps({"grpc": grpc_address, "http": http_address}))

    async def _serve(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            watcher = Watcher(self._config.registries, self._pool.on_view)
            tasks = [
                group.create_task(self._pool.run()),
                group.create_task(watcher.run()),
                group.create_task(self._report_health()),
            ]
            await stopping.wait()
            await self._drain()
            for task in tasks:
                task.cancel()

    async def _report_health(self) -> None:
        """The gRPC health service says what `/health` says: SERVING while some model can be served."""
        while True:
            change = self._pool.next_change
            await self._server.set_serving(is_serving=bool(self._pool.served_cards()) and not self._gate.is_draining)
            await change.wait()

    async def _drain(self) -> None:
        log.info("draining", streams=self._gate.count, grace_s=self._config.drain_timeout_s)
        self._gate.is_draining = True
        await self._server.set_serving(is_serving=False)
        if not await self._gate.wait_quiet(self._config.drain_timeout_s):
            log.warning("ending what still runs", count=self._gate.count)
            self._gate.fail_all(Failure(Reason.DRAINING, "the server left before the answer was complete"))
            await self._gate.wait_quiet(LEAVE_S)
