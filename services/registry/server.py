"""The registry's process: one store, one gRPC server."""

import asyncio
import json

import grpc
import structlog
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.lifetime import StartupError, write_atomically
from services.registry.config import RegistryConfig
from services.registry.memory import MemoryStore
from services.registry.service import RegistryService
from services.registry.store import Store
from services.rpc import SERVER_OPTIONS
from services.stubs import registry_pb2
from services.stubs.registry_pb2_grpc import add_RegistryServicer_to_server

log = structlog.get_logger()

STOP_GRACE_S = 0.2
"""For unary calls. The streams have no end of their own: their clients go to another registry, or wait for this one."""
SERVICE = registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name
CHANNELZ = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


async def serve(config: RegistryConfig, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set. Raises StartupError if the address cannot be had."""
    store = _store(config)
    server, healthy = _server(store)
    address = _bind(server, config.listen)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(store.run())
        await server.start()
        await healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
        try:
            if config.ready_file is not None:
                write_atomically(config.ready_file, json.dumps({"address": address}))
            log.info("registry ready", address=address, store="etcd" if config.etcd else "memory")
            await stopping.wait()
            await healthy.enter_graceful_shutdown()
        finally:
            await server.stop(STOP_GRACE_S)
            keeping.cancel()
    log.info("registry stopped")


def _store(config: RegistryConfig) -> Store:
    if config.etcd is None:
        return MemoryStore()
    from services.registry.etcd import EtcdStore  # brings an etcd client, which the embedded store must not need

    return EtcdStore(config.etcd)


def _server(store: Store) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_RegistryServicer_to_server(RegistryService(store), server)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    channelz.add_channelz_servicer(server)
    names = (SERVICE, health.SERVICE_NAME, CHANNELZ, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server, healthy


def _bind(server: grpc.aio.Server, listen: str) -> str:
    host = listen.rpartition(":")[0]
    try:
        port = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise StartupError(f"the registry cannot listen on {listen}: is the port in use? ({error})") from error
    return f"{host}:{port}"
