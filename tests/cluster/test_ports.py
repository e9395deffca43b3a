"""The ports of a cluster are checked before anything is started."""

import pytest

from services.cluster.commands import ClusterConfig
from services.cluster.ports import check_ports
from services.lifetime import StartupError


def test_any_free_port_will_do() -> None:
    check_ports(ClusterConfig(frontends=3, registry_port=0, grpc_port=0, http_port=0))


@pytest.mark.parametrize(
    ("grpc_port", "http_port", "said"),
    [
        (8000, 8001, "HTTP of frontend-1 and gRPC of frontend-2 both need port 8001: give another --grpc-port"),
        (8000, 65_535, "--http-port is too high: HTTP of frontend-2 would need port 65536"),
    ],
)
def test_ports_that_cannot_all_be_had_are_refused(grpc_port: int, http_port: int, said: str) -> None:
    with pytest.raises(StartupError, match=said):
        check_ports(ClusterConfig(frontends=2, grpc_port=grpc_port, http_port=http_port))


def test_the_host_must_be_of_this_machine() -> None:
    with pytest.raises(StartupError, match=r"cannot listen for the registry on 192\.0\.2\.1:0: "):
        check_ports(ClusterConfig(host="192.0.2.1", registry_port=0))
