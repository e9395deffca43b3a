"""The frontend process: discovery, sessions, the pipeline, gRPC and HTTP, started and ended in order.

End (SIGTERM): not ready → new requests are refused → streams finish within `drain_timeout_s` → what is left fails with
DRAINING, as its clients are told → close.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from services.core.common_layers import stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.model_card import ModelCard
from services.discovery.watcher import Watcher
from services.frontend.api.admin.admin import Admin, AdminConfig
from services.frontend.api.admin.grpc_service import SERVICE as ADMIN_SERVICE
from services.frontend.api.admin.grpc_service import AdminService, AdminTokenInterceptor
from services.frontend.api.build import build_admin_app, build_app
from services.frontend.control import LocalControl
from services.frontend.layers.transport import Transport
from services.frontend.metrics.collectors import BusyMetrics, WorkerLoadMetrics
from services.frontend.metrics.definitions import PREFIX, build_metrics
from services.frontend.metrics.outcomes import observe_refused
from services.frontend.model_catalog import ModelCatalog
from services.frontend.pipeline import PipelineConfig, frontend_layers
from services.frontend.processes.ipc import Welcome
from services.frontend.processes.membership import enter, whole_of
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.frontend.session.pool import Pool, PoolConfig
from services.http.app import HttpApp
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.listener import http_server
from services.rpc.inference_service import InferenceService
from services.rpc.server import GrpcServer
from services.runtime.listen import split_listen
from services.runtime.process import write_atomically
from services.runtime.tasks import root_cause
from services.stubs import admin_pb2_grpc, inference_pb2_grpc

log = structlog.get_logger()

LEAVE_S = 1.0
"""How long streams that are ended at the end of the drain may take to leave the pipeline. Their clients then still have
the grace of both servers to be told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """drain_timeout_s: how long streams may go on after SIGTERM. member: of several processes that share the ports,
    which one this is; None: it is the only one. settle_s_max: how long one that comes in place of another looks for
    workers before it takes its share of clients, which until then the others have.
    """

    grpc_listen: str = "127.0.0.1:50051"
    http_listen: str = "127.0.0.1:8000"
    registries: tuple[str, ...] = ("127.0.0.1:50050",)
    drain_timeout_s: float = 30.0
    metrics_prefix: str = PREFIX
    ready_file: Path | None = None
    member: Path | None = None
    settle_s_max: float = 2.0
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    admin: AdminConfig = field(default_factory=AdminConfig)


class _Served:
    """What the HTTP side asks about this frontend."""

    def __init__(self, catalog: ModelCatalog, pool: Pool, gate: Gate) -> None:
        self._catalog = catalog
        self._pool = pool
        self._gate = gate

    def models(self) -> Sequence[ModelCard]:
        return self._pool.served_cards()

    @property
    def unreached_count(self) -> int:
        return self._pool.unreached_count

    def token_bytes_of(self, model: str) -> Sequence[bytes]:
        return self._catalog.find(model).tokenizer.token_bytes

    @property
    def is_draining(self) -> bool:
        return self._gate.is_draining


class Frontend:
    """One frontend, from start to end."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._gate = Gate()
        metrics = self._metrics = build_metrics(config.metrics_prefix)
        catalog = ModelCatalog()
        self._cork = Cork()
        self._pool = Pool(catalog, config.pool, self._cork)
        busy = self._busy = BusyThresholds(config.admission)
        metrics.registry.register(WorkerLoadMetrics(self._pool, config.metrics_prefix))
        metrics.registry.register(BusyMetrics(catalog, busy, config.metrics_prefix))
        layers = frontend_layers(
            config.pipeline,
            catalog=catalog,
            pool=self._pool,
            busy=busy,
            metrics=metrics,
            gate=self._gate,
            rng=random.Random(),
        )
        pipeline = stack(*layers, innermost=Transport())
        served = self._served = _Served(catalog, self._pool, self._gate)
        on_refused = partial(observe_refused, metrics)
        self._process = LocalControl(metrics.registry, self._gate, busy)
        whole = self._whole = self._process if config.member is None else whole_of(config.member)
        admin = self._admin = Admin(config.admin, catalog, busy, whole)
        in_reach = admin if config.admin.is_with_clients else None
        self._app = build_app(pipeline, served, whole, config.http, on_refused, in_reach)
        self._server = _grpc_server(["unbroken.v1.Inference"], in_reach, is_shared=self._is_shared)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceService(pipeline, self._gate, on_refused, config.http.client, whole.cancel), self._server.server
        )

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and all is drained. Raises StartupError when it can't start."""
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as servers:
                watcher = Watcher(self._config.registries, self._pool.on_change)
                tasks = [group.create_task(self._pool.run()), group.create_task(watcher.run())]
                await self._open(servers)
                tasks.append(group.create_task(self._report_health()))
                await stopping.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        log.info("frontend stopped")

    async def _open(self, servers: AsyncExitStack) -> None:
        """Listen, and say where."""
        if self._config.member is not None:
            await self._settle(await enter(servers, self._config.member, self._process))
        addresses = await self._listen(servers)
        log.info("frontend ready", **addresses)
        if self._config.ready_file is not None:
            write_atomically(self._config.ready_file, json.dumps(addresses))

    async def _settle(self, welcome: Welcome) -> None:
        """Be as the other processes are: with their thresholds, and with workers if they have any."""
        for model, changes in welcome.changes.items():
            await self._process.set_thresholds(model, changes)
        if not welcome.is_successor:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.settle_s_max):
                while not self._pool.has_all:
                    await self._pool.next_change.wait()

    async def _listen(self, servers: AsyncExitStack) -> dict[str, str]:
        """Start all servers, those of operators first: they close last. Returns their real addresses."""
        config, admin, addresses = self._config, self._config.admin, {}
        if admin.is_on and admin.grpc_listen is not None:
            server = await servers.enter_async_context(_grpc_server([], self._admin, is_shared=self._is_shared))
            addresses["admin_grpc"] = await server.start(admin.grpc_listen, option="--admin-grpc-listen")
            await server.set_serving(is_serving=True)
        if admin.is_on and admin.listen is not None:
            app = build_admin_app(self._admin, self._served, self._whole, config.http)
            addresses["admin_http"] = await self._start_http(servers, app, admin.listen, "--admin-listen")
        await servers.enter_async_context(self._server)
        addresses["grpc"] = await self._server.start(config.grpc_listen, option="--grpc-listen")
        addresses["http"] = await self._start_http(servers, self._app, config.http_listen, "--http-listen")
        return addresses

    async def _start_http(self, servers: AsyncExitStack, app: HttpApp, listen: str, option: str) -> str:
        """Serve until `servers` close. Returns the real address."""
        host, port = split_listen(listen)
        serving = http_server(
            app, self._config.http, host, port, option=option, is_shared=self._is_shared, cork=self._cork
        )
        server = await servers.enter_async_context(serving)
        return f"{host}:{server.port}"

    @property
    def _is_shared(self) -> bool:
        return self._config.member is not None

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


def _grpc_server(services: Sequence[str], admin: Admin | None, *, is_shared: bool) -> GrpcServer:
    """A server of these services, and of Admin if there is one."""
    if admin is None:
        return GrpcServer(services, is_shared=is_shared)
    guards = [AdminTokenInterceptor(admin)]
    server = GrpcServer(services, always=[ADMIN_SERVICE], guards=guards, is_shared=is_shared)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(admin), server.server)
    return server
