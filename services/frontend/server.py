"""The frontend process: starts and stops discovery, sessions, the pipeline, and the servers of clients, in order.

Stop (SIGTERM): report not ready → refuse new requests → let streams finish within `drain_timeout_s` → fail the rest
with DRAINING, which their clients see → close.
"""

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from services.access.keys_watch import AccessConfig, WatchedKeys
from services.core.common_layers import stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Layer
from services.core.model_card import ModelCard
from services.core.tenant import Tenant
from services.discovery.watcher import Watcher
from services.frontend.api.admin.admin import NO_TOKEN_HINT, Admin, AdminConfig
from services.frontend.api.admin.grpc_service import SERVICE as ADMIN_SERVICE
from services.frontend.api.admin.grpc_service import AdminService, admin_guard
from services.frontend.api.build import build_admin_app, build_app
from services.frontend.control import Canceller, FrontendControl, LocalControl
from services.frontend.layers.transport import Transport
from services.frontend.limits.tenant_limits import TenantLimits
from services.frontend.metrics.collectors import BusyMetrics, MigrationLimitMetrics, TenantMetrics, WorkerLoadMetrics
from services.frontend.metrics.definitions import PREFIX, build_metrics
from services.frontend.metrics.outcomes import observe_refused
from services.frontend.model_catalog import ModelCatalog
from services.frontend.pipeline import PipelineConfig, frontend_layers
from services.frontend.processes.ipc import JoinResponse
from services.frontend.processes.membership import group_control, join_group
from services.frontend.resume.finder import GenerationFinder
from services.frontend.routing.rejection import no_workers
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.frontend.session.pool import Pool, PoolConfig
from services.http.app import HttpApp
from services.http.connection_metrics import ConnectionMetrics, TlsMetrics
from services.http.grpc.routes import GrpcRoutes
from services.http.grpc.web.routes import WebRoutes
from services.http.host_rule import HostRule
from services.http.server.clients import Clients
from services.http.server.config import HttpConfig
from services.http.server.cork import Cork
from services.http.server.listener import Listen, http_server
from services.models.tokenizers import Vocabulary
from services.rpc.common_services import HEALTH_SERVICE, REFLECTION_SERVICES, CommonServices
from services.rpc.inference_service import InferenceService
from services.runtime.address import is_local as is_local_host
from services.runtime.address import split_address
from services.runtime.process import write_atomically
from services.runtime.tasks import root_cause
from services.stubs import admin_pb2_grpc, inference_pb2_grpc
from services.tls.certificate import PairFiles
from services.tls.peers import PeerFiles, peers_with
from services.tls.roles import Role
from services.tls.watch import WatchedCertificate, watched_pair

log = structlog.get_logger()

LEAVE_S = 1.0
"""How long streams that are failed at the end of the drain may take to leave the pipeline. Afterwards the grace period
of the server still lets their clients read the reason."""
SERVICE = "unbroken.v1.Inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig:
    """Configuration of one frontend process.

    drain_timeout_s: how long streams may continue after SIGTERM.
    member: this process's path in its process group (see processes/membership.py); None if it is the only process.
    settle_s_max: how long a process that replaces one that exited waits for sessions with workers before it accepts
    clients. Until then the other processes serve all clients.
    tls: the certificate for the ports of clients and operators, and its key; None: they are served without TLS.
    peers: the certificate for workers and registries; None: they are reached without TLS.
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
    access: AccessConfig = field(default_factory=AccessConfig)
    tls: PairFiles | None = None
    peers: PeerFiles | None = None


class _Served:
    """The state of this frontend that the HTTP API reads."""

    def __init__(self, catalog: ModelCatalog, pool: Pool, gate: Gate) -> None:
        self._catalog = catalog
        self._pool = pool
        self._gate = gate

    def models(self) -> Sequence[ModelCard]:
        return self._pool.served_cards()

    def model(self, name: str, tenant: Tenant) -> ModelCard:
        for card in self.models():
            if card.model == name and tenant.may_use(name):
                return card
        card = self._catalog.find(name, tenant).card
        raise no_workers(f"no worker serves {card.model!r} at the moment")

    @property
    def has_view(self) -> bool:
        return self._catalog.has_view

    @property
    def unreached_count(self) -> int:
        return self._pool.unreached_count

    def vocabulary_of(self, model: str) -> Vocabulary:
        return self._catalog.find(model).tokenizer

    @property
    def is_draining(self) -> bool:
        return self._gate.is_draining


class Frontend:
    """One frontend process."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._gate = Gate()
        self._metrics = build_metrics(config.metrics_prefix)
        self._peers = peers_with(config.peers, Role.FRONTEND)
        self._catalog = ModelCatalog(self._metrics.count_lost, self._peers)
        self._cork = Cork()
        self._pool = Pool(self._catalog, config.pool, self._cork, self._peers)
        self._busy = BusyThresholds(config.admission)
        self._metrics.registry.register(WorkerLoadMetrics(self._pool, config.metrics_prefix))
        limits = MigrationLimitMetrics(self._pool, config.pipeline.migrate.limit, config.metrics_prefix)
        self._metrics.registry.register(limits)
        self._metrics.registry.register(BusyMetrics(self._catalog, self._busy, config.metrics_prefix))
        self._served = _Served(self._catalog, self._pool, self._gate)
        self._process = LocalControl(self._metrics.registry, self._gate, self._busy)
        self._control: FrontendControl = self._process if config.member is None else group_control(config.member)
        self._keys = None if config.access.keys_file is None else WatchedKeys(config.access.keys_file)
        self._tls = None if config.tls is None else watched_pair(config.tls, time.time)
        if self._tls is not None:
            self._metrics.registry.register(TlsMetrics(config.metrics_prefix, self._tls))
        self._limits = None if self._keys is None else TenantLimits(self._pool.frontend_count, random.Random())
        if self._limits is not None:
            self._metrics.registry.register(
                TenantMetrics(self._limits, self._pool.count_frontends, config.metrics_prefix)
            )
        self._admin = Admin(
            config.admin, self._catalog, self._busy, self._control, clients_need_keys=self._keys is not None
        )
        admin = self._admin if config.admin.is_with_clients else None
        pipeline = self._pipeline()
        on_refused = partial(observe_refused, self._metrics)
        tenant_of = None if self._keys is None else self._keys.tenant_of
        finder = GenerationFinder(self._pool, random.Random())
        self._app = build_app(
            pipeline,
            self._served,
            self._control,
            config.http,
            on_refused,
            finder,
            admin,
            self._metrics,
            tenant_of,
            _host_rule(config),
        )
        self._clients: list[Clients] = []
        self._metrics.registry.register(ConnectionMetrics(config.metrics_prefix, self._clients))
        bounds, cancel = config.http.client, Canceller(self._control, finder).cancel
        service = InferenceService(pipeline, self._gate, on_refused, bounds, cancel, finder, config.http.keep)
        self._rpcs = GrpcRoutes(bounds, service.on_refused)
        self._rpcs.add(inference_pb2_grpc.add_InferenceServicer_to_server, service)
        self._common = CommonServices([SERVICE], always=[] if admin is None else [ADMIN_SERVICE])
        self._common.add_to(self._rpcs)
        if tenant_of is not None:
            for name in (SERVICE, *REFLECTION_SERVICES):
                self._rpcs.guard(name, tenant_of, takes_pages=True)
            self._rpcs.open_to_strangers(HEALTH_SERVICE)
        if admin is not None:
            _add_admin(self._rpcs, admin)

    def _pipeline(self) -> Layer:
        layers = frontend_layers(
            self._config.pipeline,
            catalog=self._catalog,
            pool=self._pool,
            busy=self._busy,
            metrics=self._metrics,
            gate=self._gate,
            rng=random.Random(),
            limits=self._limits,
        )
        return stack(*layers, innermost=Transport())

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set and the process has drained. Raises StartupError if it cannot start."""
        try:
            async with asyncio.TaskGroup() as group, AsyncExitStack() as servers:
                servers.push_async_callback(self._catalog.close)  # Last: requests may be under way until then.
                watcher = Watcher(self._config.registries, self._pool.on_change, self._peers)
                tasks = [group.create_task(self._pool.run()), group.create_task(watcher.run())]
                if self._keys is not None:
                    tasks.append(group.create_task(self._keys.run()))
                tasks += [group.create_task(files.run()) for files in self._watched]
                await self._open(servers)
                tasks.append(group.create_task(self._report_health()))
                await stopping.wait()
                await self._drain()
                for task in tasks:
                    task.cancel()
        except ExceptionGroup as errors:
            raise root_cause(errors) from None
        log.info("frontend stopped")

    @property
    def _watched(self) -> list[WatchedCertificate[Any]]:
        """The certificates that may change."""
        return [*([] if self._tls is None else [self._tls]), *([] if self._peers is None else [self._peers.files])]

    async def _open(self, servers: AsyncExitStack) -> None:
        """Join the process group, if there is one, start listening, and report the addresses."""
        if self._config.member is not None:
            await self._settle(await join_group(servers, self._config.member, self._process))
        addresses = await self._listen(servers)
        if self._keys is None:
            log.info("clients need no keys", remedy="with --keys-file they do: see `unbroken keys`")
        if self._admin.is_refusing:
            why = "clients need keys, and there is no admin token"
            log.info("admin calls are refused", why=why, remedy=NO_TOKEN_HINT)
        log.info("frontend ready", **addresses)
        if self._config.ready_file is not None:
            write_atomically(self._config.ready_file, json.dumps(addresses))

    async def _settle(self, joined: JoinResponse) -> None:
        """Adopt the group's thresholds. A process that replaces another also waits for sessions with all workers."""
        for model, changes in joined.changes.items():
            await self._process.set_thresholds(model, changes)
        if not joined.is_successor:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.settle_s_max):
                while not self._pool.has_all:
                    await self._pool.next_change.wait()

    async def _listen(self, servers: AsyncExitStack) -> dict[str, str]:
        """Start the servers. That of operators starts first and therefore closes last. Returns the real addresses."""
        config, addresses = self._config, {}
        if listens := _admin_listens(config.admin):
            app = build_admin_app(self._admin, self._served, self._control, config.http)
            common, rpcs = CommonServices([], always=[ADMIN_SERVICE]), GrpcRoutes(config.http.client)
            await common.set_serving(is_serving=True)
            common.add_to(rpcs)
            _add_admin(rpcs, self._admin)
            addresses = await self._start(servers, app, rpcs, listens)
        await self._common.set_serving(is_serving=False)
        listens = {
            "grpc": Listen(config.grpc_listen, "gRPC", "--grpc-listen"),
            "http": Listen(config.http_listen, "HTTP", "--http-listen"),
        }
        return addresses | await self._start(servers, self._app, self._rpcs, listens)

    async def _start(
        self, servers: AsyncExitStack, app: HttpApp, rpcs: GrpcRoutes, listens: Mapping[str, Listen]
    ) -> dict[str, str]:
        """Serve at all addresses until `servers` close. Returns the real addresses, by the names of `listens`."""
        WebRoutes(rpcs).add_to(app.routes)
        serving = http_server(
            app,
            self._config.http,
            *listens.values(),
            is_shared=self._is_shared,
            cork=self._cork,
            rpcs=rpcs,
            tls=self._tls,
        )
        server = await servers.enter_async_context(serving)
        self._clients.append(server.context.clients)
        return dict(zip(listens, server.addresses, strict=True))

    @property
    def _is_shared(self) -> bool:
        return self._config.member is not None

    async def _report_health(self) -> None:
        """Keep the gRPC health service equal to `/health`: SERVING while at least one model can be served."""
        while True:
            change = self._pool.next_change
            await self._common.set_serving(is_serving=bool(self._pool.served_cards()) and not self._gate.is_draining)
            await change.wait()

    async def _drain(self) -> None:
        log.info("draining", streams=self._gate.count, grace_s=self._config.drain_timeout_s)
        self._gate.is_draining = True
        await self._common.set_serving(is_serving=False)
        for clients in self._clients:
            clients.drain()
        if not await self._gate.wait_quiet(self._config.drain_timeout_s):
            log.warning("drain timeout: ending the remaining streams", count=self._gate.count)
            self._gate.fail_all(Failure(Reason.DRAINING, "the server stopped before the answer was complete"))
            await self._gate.wait_quiet(LEAVE_S)


def _host_rule(config: FrontendConfig) -> HostRule:
    """Which names requests may have in `Host` and `Origin`."""
    access, listens = config.access, (config.http_listen, config.grpc_listen)
    is_local = not access.allows_anonymous and all(is_local_host(split_address(one)[0]) for one in listens)
    return HostRule(is_open=access.keys_file is None, is_local=is_local)


def _add_admin(rpcs: GrpcRoutes, admin: Admin) -> None:
    """Serve the Admin service too, to callers with its token."""
    rpcs.guard(ADMIN_SERVICE, admin_guard(admin))
    rpcs.add(admin_pb2_grpc.add_AdminServicer_to_server, AdminService(admin))


def _admin_listens(admin: AdminConfig) -> dict[str, Listen]:
    """The addresses for operators alone, by their names in the ready file."""
    listens = {
        "admin_grpc": (admin.grpc_listen, "gRPC", "--admin-grpc-listen"),
        "admin_http": (admin.listen, "HTTP", "--admin-listen"),
    }
    return {
        name: Listen(address, what, option)
        for name, (address, what, option) in listens.items()
        if address is not None and admin.is_on
    }
