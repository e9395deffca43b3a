"""The distribution has no Rust in its core and no generated code in git, works with two major versions of protobuf,
imports the etcd client only in registries, and needs no TensorRT-LLM."""

import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.fakes.tensorrt_llm.version import __version__
from tests.support.environments import ROOT, python_with_protobuf_6, run

RUST_FILES = ("Cargo.toml", "Cargo.lock", ".rs")
RUST_BUILDERS = ("maturin", "setuptools-rust", "setuptools_rust")
RUST_SYMBOLS = (b"rust_begin_unwind", b"rust_eh_personality", b"/rustc/")

ROUND_TRIP = """
import asyncio, importlib, pkgutil, sys
import grpc
import google.protobuf
import services.stubs
from grpc_status import rpc_status
from services.core.errors import Failure, Reason
from services.rpc.status import CHANNEL_OPTIONS, failure_of, status_of
from tests.support.clock import WAIT_S
for module in pkgutil.iter_modules(services.stubs.__path__):
    importlib.import_module(f"services.stubs.{module.name}")
from services.stubs.registry_pb2 import DrainRequest, Instance, ListRequest, ListResponse
from services.stubs.registry_pb2_grpc import RegistryServicer, RegistryStub, add_RegistryServicer_to_server

class Server(RegistryServicer):
    async def List(self, request, context):
        return ListResponse(instances=[Instance(instance_id="é", address="h:1")], revision=2**62)
    async def Drain(self, request, context):
        status = rpc_status.to_status(status_of(Failure(Reason.DRAINING, "leaving", retry_after_s=1.5)))
        await context.abort(status.code, status.details, status.trailing_metadata)

async def main():
    server = grpc.aio.server()
    add_RegistryServicer_to_server(Server(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        stub = RegistryStub(channel)
        answer = await stub.List(ListRequest(), timeout=WAIT_S)
        assert answer == ListResponse(instances=[Instance(instance_id="é", address="h:1")], revision=2**62)
        try:
            await stub.Drain(DrainRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            assert failure_of(error, otherwise=Reason.INTERNAL).reason is Reason.DRAINING
    await server.stop(None)

asyncio.run(main())
print(google.protobuf.__version__)
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("services.worker", "services.frontend"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        importlib.import_module(module.name)
assert "grpc" in sys.modules
assert "etcd3aio" not in sys.modules
"""


def core_of(name: str) -> dict[str, Distribution]:
    """The distributions that `name` requires without extras, by name."""
    found: dict[str, Distribution] = {}
    pending = [name]
    while pending:
        current = pending.pop()
        if current in found:
            continue
        found[current] = distribution(current)
        for line in found[current].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return found


def rust_in(dist: Distribution) -> list[str]:
    """Traces of Rust in a distribution."""
    builder = [line for line in (dist.read_text("WHEEL") or "").splitlines() if line.startswith("Generator")]
    traces = [line for line in builder if any(name in line for name in RUST_BUILDERS)]
    for file in dist.files or ():
        path = Path(str(file.locate()))
        if file.name.endswith(RUST_FILES):
            traces.append(str(file))
        elif (path.suffix == ".so" or path.parent.name == "bin") and path.is_file():
            content = path.read_bytes()
            traces += [f"{file}: {symbol.decode()}" for symbol in RUST_SYMBOLS if symbol in content]
    return traces


def test_no_distribution_of_the_core_contains_rust() -> None:
    core = core_of("unbroken")

    assert {"grpcio", "protobuf", "aiohttp", "msgspec", "multidict"} <= core.keys(), (
        "indirect requirements are included"
    )
    assert {name: traces for name, dist in core.items() if (traces := rust_in(dist))} == {}


def test_check_finds_rust_in_a_rust_distribution() -> None:
    assert len(rust_in(distribution("ruff"))) > 1


def test_no_extra_needs_tensorrt_llm() -> None:
    """PyPI has no wheel of it, so downloading all extras would fail."""
    needed = {Requirement(line).name for line in distribution("unbroken").requires or ()}

    assert "tokenizers" in needed, "extras are included"
    assert not [name for name in needed if "tensorrt" in name]


def test_gpu_image_has_the_version_of_tensorrt_llm_that_the_tests_fake() -> None:
    assert f"FROM nvcr.io/nvidia/tensorrt-llm/release:{__version__}\n" in (ROOT / "Dockerfile.trtllm").read_text()


def test_no_generated_stub_is_committed() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")

    assert run("git", "ls-files", "services/stubs").split() == ["services/stubs/__init__.py"]


def test_stubs_work_with_protobuf_6() -> None:
    assert run(python_with_protobuf_6(), "-c", ROUND_TRIP).startswith("6.33.")


def test_stubs_work_with_protobuf_7() -> None:
    assert run(sys.executable, "-c", ROUND_TRIP).startswith("7.")


def test_workers_and_frontends_do_not_import_the_etcd_client() -> None:
    run(sys.executable, "-c", IMPORT_ALL)
