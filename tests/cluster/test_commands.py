"""Command lines of a cluster: processes find each other, and a restarted process keeps its addresses."""

from pathlib import Path

import pytest

from services.cluster.commands import (
    ClusterConfig,
    check_ports,
    frontend_command,
    reachable,
    registry_command,
    worker_command,
)
from services.runtime.process import StartupError


def test_each_frontend_takes_the_next_port_and_keeps_it_after_a_restart() -> None:
    config = ClusterConfig(grpc_port=50051, http_port=0)

    first = frontend_command(config, 1, Path("r"), {}, registry="0.0.0.0:7")
    later = frontend_command(config, 1, Path("r"), {"grpc": "h:1", "http": "h:2"}, registry="0.0.0.0:7")

    assert {"--grpc-listen=127.0.0.1:50052", "--http-listen=127.0.0.1:0", "--registry=127.0.0.1:7"} <= set(first)
    assert {"--grpc-listen=h:1", "--http-listen=h:2"} <= set(later)


def test_registry_keeps_its_address_after_a_restart() -> None:
    config = ClusterConfig(host="::1", registry_port=0)

    assert "--listen=[::1]:0" in registry_command(config, Path("r"), {})
    assert "--listen=[::1]:77" in registry_command(config, Path("r"), {"address": "[::1]:77"})


def test_worker_options_come_last_and_no_model_is_set_by_default() -> None:
    command = worker_command(ClusterConfig(worker_options=("--mocker-itl-ms", "6")), Path("r"), registry="h:1")

    assert command[-2:] == ["--mocker-itl-ms", "6"]
    assert not [word for word in command if word.startswith("--model")]


def test_wildcard_address_is_reached_by_loopback() -> None:
    assert reachable("0.0.0.0:1") == "127.0.0.1:1"
    assert reachable("[::]:1") == "[::1]:1"
    assert reachable("host:1") == "host:1"


def test_ports_of_0_are_always_available() -> None:
    check_ports(ClusterConfig(frontends=3, registry_port=0, grpc_port=0, http_port=0))


@pytest.mark.parametrize(
    ("grpc_port", "http_port", "said"),
    [
        (8000, 8001, "HTTP of frontend-1 and gRPC of frontend-2 both need port 8001: give another --grpc-port"),
        (8000, 65_535, "--http-port is too high: HTTP of frontend-2 would need port 65536"),
    ],
)
def test_conflicting_ports_are_refused(grpc_port: int, http_port: int, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        check_ports(ClusterConfig(frontends=2, grpc_port=grpc_port, http_port=http_port))


def test_host_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupError, match=r"cannot listen for the registry on 192\.0\.2\.1:0: "):
        check_ports(ClusterConfig(host="192.0.2.1", registry_port=0))
