"""The frontend process: discovery, sessions, the pipeline, gRPC and HTTP, started and ended in order.

End (SIGTERM): not ready → new requests are refused → streams finish within `drain_timeout_s` → what is left fails with
DRAINING, as its clients are told → close.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from services.card import ModelCard
from services.discovery import Watcher
from services.errors import Failure, Reason
from services.frontend.admin import Admin, AdminConfig
from services.frontend.admin_service import SERVICE as ADMIN_SERVICE
from services.frontend.admin_service import AdminService, RefuseStrangers
from services.frontend.busy import AdmissionConfig, BusyThresholds
from services.frontend.busy_metrics import BusyMetrics
from services.frontend.catalogue import Catalogue
from services.frontend.http import HttpConfig, build_admin_app, build_app, start_http
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
from services.stubs import admin_pb2_grpc, inference_pb2_grpc

log = structlog.get_logger()

LEAVE_S = 1.0
"""How long streams that are ended at the end of the drain may take to leave the pipeline. Their clients then still have
the grace of both servers to be told why."""


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
        metrics = self._metrics = build_metrics(config.metrics_prefix)
        catalogue = Catalogue()
        self._pool = Pool(catalogue, config.pool)
        busy = BusyThresholds(config.admission)
        metrics.registry.register(WorkerMetrics(self._pool, config.metrics_prefix))
        metrics.registry.register(BusyMetrics(catalogue, busy, config.metrics_prefix))
        layers = frontend_layers(
            config.pipeline,
            catalogue=catalogue,
            pool=self._pool,
            busy=busy,
            metrics=metrics,
            gate=self._gate,
            rng=random.Random(),
        )
        pipeline = stack(*layers, innermost=Transport(self._pool))
        served = self._served = _Served(catalogue, self._pool, self._gate)
        on_refused = partial(observe_refused, metrics)
        admin = self._admin = Admin(config.admin, catalogue, busy)
        in_reach = admin if config.admin.is_with_clients else None
        self._app = build_app(pipeline, served, metrics.registry, config.http, on_refused, in_reach)
        self._server = _grpc_server(["unbroken.v1.Inference"], in_reach)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(pipeline, self._gate, on_refused, config.http.client), self._server.server
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and all is drained. Raises StartupError when it can't start."""
        async with AsyncExitStack() as servers:
            addresses = await self._listen(servers)
            log.info("frontend ready", **addresses)
            if self._config.ready_file is not None:
                write_atomically(self._config.ready_file, json.dumps(addresses))
            await self._serve(stopping)

    async def _listen(self, servers: AsyncExitStack) -> dict[str, str]:
        """Start all servers, those of operators first: they close last. Returns their real addresses."""
        config, admin, addresses = self._config, self._config.admin, {}
        if admin.is_on and admin.grpc_listen is not None:
            server = await servers.enter_async_context(_grpc_server([], self._admin))
            addresses["admin_grpc"] = await server.start(admin.grpc_listen, option="--admin-grpc-listen")
            await server.set_serving(is_serving=True)
        if admin.is_on and admin.listen is not None:
            app = build_admin_app(self._admin, self._served, self._metrics.registry, config.http)
            addresses["admin_http"] = await _start_http(servers, app, admin.listen, "--admin-listen")
        await servers.enter_async_context(self._server)
        addresses["grpc"] = await self._server.start(config.grpc_listen, option="--grpc-listen")
        addresses["http"] = await _start_http(servers, self._app, config.http_listen, "--http-listen")
        return addresses

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


def _grpc_server(services: Sequence[str], admin: Admin | None) -> GrpcServer:
    """A server of these services, and of Admin if there is one."""
    if admin is None:
        return GrpcServer(services)
    server = GrpcServer(services, always=[ADMIN_SERVICE], guards=[RefuseStrangers(admin)])
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(admin), server.server)
    return server


async def _start_http(servers: AsyncExitStack, app: web.Application, listen: str, option: str) -> str:
    """Serve until `servers` close. Returns the real address."""
    host, port = split_listen(listen)
    runner, real_port = await start_http(app, host, port, option=option)
    servers.push_async_callback(runner.cleanup)
    return f"{host}:{real_port}"
