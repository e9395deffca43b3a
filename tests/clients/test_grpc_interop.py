"""grpc-go's interoperability client gets from the gRPC server what it expects.

Source: doc/interop-test-descriptions.md of github.com/grpc/grpc.
"""

import subprocess
from collections.abc import Iterator

import pytest

from tests.clients.conftest import need
from tests.clients.support.serving import serving_program
from tests.clients.support.toolchains import GRPC_INTEROP

CASES = (
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "cancel_after_begin",
    "cancel_after_first_response",
    "timeout_on_sleeping_server",
    "status_code_and_message",
    "special_status_message",
    "unimplemented_method",
    "unimplemented_service",
    "custom_metadata",
)
CASE_S_MAX = 60.0


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving_program("tests.clients.grpc_interop.server") as port:
        yield port


def run_case(port: int, case: str) -> "subprocess.CompletedProcess[str]":
    command = [*GRPC_INTEROP.command(), "--server_host=127.0.0.1", f"--server_port={port}", f"--test_case={case}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=CASE_S_MAX, check=False)


@pytest.mark.parametrize("case", CASES)
def test_case_passes(port: int, case: str) -> None:
    need(GRPC_INTEROP.missing)

    done = run_case(port, case)

    assert done.returncode == 0, done.stderr


def test_client_notices_what_is_wrong(port: int) -> None:
    """The server has no service of this name, which the case needs."""
    need(GRPC_INTEROP.missing)

    assert run_case(port, "orca_per_rpc").returncode != 0
