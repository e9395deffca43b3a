"""The registry's process: one store, one gRPC server."""

import asyncio
import json

import structlog

from services.registry.config import RegistryConfig
from services.registry.memory_store import MemoryStore
from services.registry.service import RegistryService
from services.registry.store import Store
from services.rpc.server import GrpcServer
from services.runtime.process import write_atomically
from services.stubs import registry_pb2
from services.stubs.registry_pb2_grpc import add_RegistryServicer_to_server

log = structlog.get_logger()

SERVICE = registry_pb2.DESCRIPTOR.services_by_name["Registry"].full_name


async def serve(config: RegistryConfig, stopping: asyncio.Event) -> None:
    """Serve until `stopping` is set. Raises StartupError, in a group, if the address cannot be had."""
    store = _store(config)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(store.run())
        async with GrpcServer([SERVICE]) as server:
            add_RegistryServicer_to_server(RegistryService(store), server.server)
            address = await server.start(config.listen)
            readiness = group.create_task(_serve_once_known(store, server))
            if config.ready_file is not None:
                write_atomically(config.ready_file, json.dumps({"address": address}))
            log.info("registry ready", address=address, store="etcd" if config.etcd else "memory")
            await stopping.wait()
            readiness.cancel()
            await server.set_serving(is_serving=False)
        keeping.cancel()  # After the server: a registration whose stream breaks renews its lease once more.
    log.info("registry stopped")


async def _serve_once_known(store: Store, server: GrpcServer) -> None:
    """A registry that has never reached its store listens, to say so, but is not healthy."""
    await store.view.wait_known()
    await server.set_serving(is_serving=True)


def _store(config: RegistryConfig) -> Store:
    if config.etcd is None:
        return MemoryStore()
    from services.registry.etcd_store import (
        EtcdStore,
    )  # brings an etcd client, which the embedded store must not need

    return EtcdStore(config.etcd)
