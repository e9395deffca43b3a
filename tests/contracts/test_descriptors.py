"""TensorRT-LLM's etcd client and the modules of a worker can be loaded in one process, in either order.

The client adds etcd's `rpc.proto`, `kv.proto` and `auth.proto` to the descriptor pool of the process. Other files with
the same names or packages can then no longer be loaded.
"""

import sys
from pathlib import Path

import pytest

from tests.support.environments import python_with_protobuf_6, run, target_with

CLIENT = "etcd-sdk-python==0.0.7"
IMPORT_CLIENT = "import pyetcd"
IMPORT_MESSAGES = """
import importlib, pkgutil
for name in ("services.stubs", "grpc_health.v1", "grpc_reflection.v1alpha", "google.rpc"):
    for module in pkgutil.iter_modules(importlib.import_module(name).__path__, f"{name}."):
        if module.name.endswith(("_pb2", "_pb2_grpc")):
            importlib.import_module(module.name)
"""
IMPORT_WORKER = """
import importlib, pkgutil
for name in ("services.worker", "services.frontend", "services.cli", "services.models.tokenizers"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if module.name != "services.cli.registry":
            importlib.import_module(module.name)
"""
IMPORT_OUR_ETCD = "import etcd3aio"
USE_CLIENT = """
import google.protobuf, pyetcd.etcdrpc
assert pyetcd.etcdrpc.RangeRequest.FromString(pyetcd.etcdrpc.RangeRequest(key=b"k").SerializeToString()).key == b"k"
print(google.protobuf.__version__)
"""
PRINT_MESSAGES = """
import sys
print(*(name for name in sys.modules if name.endswith("_pb2") and not name.startswith("google.protobuf.")))
"""

IN_EITHER_ORDER = pytest.mark.parametrize("client_is_first", [True, False], ids=["first", "last"])


def run_with_client(python: Path, ours: str, *, client_is_first: bool) -> str:
    """Load both, use the client, and return the version of protobuf."""
    order = (IMPORT_CLIENT, ours) if client_is_first else (ours, IMPORT_CLIENT)
    return run(python, "-c", "\n".join((*order, USE_CLIENT)), import_path=(target_with(CLIENT),))


@IN_EITHER_ORDER
def test_client_and_worker_load_together_with_protobuf_7(client_is_first: bool) -> None:
    assert run_with_client(Path(sys.executable), IMPORT_WORKER, client_is_first=client_is_first).startswith("7.")


@IN_EITHER_ORDER
def test_client_and_our_messages_load_together_with_protobuf_6(client_is_first: bool) -> None:
    assert run_with_client(python_with_protobuf_6(), IMPORT_MESSAGES, client_is_first=client_is_first).startswith(
        "6.33."
    )


def test_list_of_message_packages_covers_all_that_a_worker_loads() -> None:
    ours = run(sys.executable, "-c", IMPORT_MESSAGES + PRINT_MESSAGES).split()
    of_a_worker = run(sys.executable, "-c", IMPORT_WORKER + PRINT_MESSAGES).split()

    assert "services.stubs.worker_pb2" in of_a_worker
    assert set(of_a_worker) - set(ours) == set()


def test_second_etcd_client_is_found_as_a_conflict() -> None:
    """The registry's own etcd client is such a second one, so no worker loads it."""
    with pytest.raises(AssertionError, match=r"duplicate (symbol|file name)"):
        run(sys.executable, "-c", f"{IMPORT_CLIENT}\n{IMPORT_OUR_ETCD}", import_path=(target_with(CLIENT),))
