"""The registry process: one store and one gRPC server."""

import asyncio
import json

import structlog

from services.http.grpc.routes import GrpcRoutes
from services.http.rpc_server import rpc_server
from services.registry.config import RegistryConfig
from services.registry.memory_store import MemoryStore
from services.registry.service import RegistryService
from services.registry.store import Store
from services.rpc.common_services import CommonServices
from services.runtime.process import write_atomically
from services.stubs import registry_pb2
from services.stubs.registry_pb2_grpc import add_RegistryServicer_to_server
from services.tls.peers import peers_with
from services.tls.roles import EVERY_ROLE, Role

log = structlog.get_logger()

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name


async def serve(config: RegistryConfig, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set. Raises an exception group with a StartupError if it cannot listen."""
    store = _store(config)
    peers = peers_with(config.peers, Role.REGISTRY)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(store.run())
        if peers is not None:
            watching = group.create_task(peers.files.run())
        rpcs, common = GrpcRoutes(peers=peers), CommonServices([SERVICE])
        rpcs.add(add_RegistryServicer_to_server, RegistryService(store))
        common.add_to(rpcs)
        await common.set_serving(is_serving=False)
        async with rpc_server(rpcs, config.listen, None if peers is None else peers.door(EVERY_ROLE)) as server:
            [address] = server.addresses
            readiness = group.create_task(_serve_once_known(store, common))
            if config.ready_file is not None:
                write_atomically(config.ready_file, json.dumps({"address": address}))
            log.info("registry ready", address=address, store="etcd" if config.etcd else "memory")
            await stopping.wait()
            readiness.cancel()
            await common.set_serving(is_serving=False)
        if peers is not None:
            watching.cancel()
        keeping.cancel()  # After the server, because registrations renew their leases once more when their streams end.
    log.info("registry stopped")


async def _serve_once_known(store: Store, common: CommonServices) -> None:
    """Report healthy once the store has been reached. Until then the registry listens, but answers UNAVAILABLE."""
    await store.cache.wait_known()
    await common.set_serving(is_serving=True)


def _store(config: RegistryConfig) -> Store:
    if config.etcd is None:
        return MemoryStore()
    from services.registry.etcd_store import EtcdStore  # Imports an etcd client: only when it is needed.

    return EtcdStore(config.etcd)
