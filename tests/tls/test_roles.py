"""Each rpc of a worker and of a registry has a row that says who may call it, and each row has its rpc."""

from services.http.grpc.routes import GrpcRoutes
from services.registry.memory_store import MemoryStore
from services.registry.server import SERVICE
from services.registry.service import RegistryService
from services.rpc.common_services import CommonServices
from services.stubs import registry_pb2_grpc
from services.tls.roles import MAY_CALL, Role, callers_of
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.server import Worker, WorkerConfig
from tests.support.doubles import run_async


def test_each_rpc_has_a_row_and_each_row_its_rpc() -> None:
    async def scenario() -> set[str]:
        registry = GrpcRoutes()
        registry.add(registry_pb2_grpc.add_RegistryServicer_to_server, RegistryService(MemoryStore()))
        CommonServices([SERVICE]).add_to(registry)
        return {*registry.methods, *Worker(MockerEngine(MockerConfig()), WorkerConfig())._rpcs.methods}

    assert {path[1:] for path in run_async(scenario())} == set(MAY_CALL)


def test_what_has_no_row_nobody_may_call() -> None:
    assert callers_of("/unbroken.v1.Registry/New") == frozenset()


def test_only_operators_call_inference_of_a_worker() -> None:
    assert {callers_of(f"/unbroken.v1.Inference/{name}") for name in ("Generate", "Resume", "Cancel")} == {
        frozenset({Role.OPERATOR})
    }
