"""The ports that a local cluster is told to use, checked before anything is started."""

from collections.abc import Iterator

from services.cluster.commands import ClusterConfig, join, port_of
from services.lifetime import StartupError
from services.listening import bind_error, cannot_listen
from services.rpc import PORT_MAX


def check_ports(config: ClusterConfig) -> None:
    """Raises StartupError for a port that can't be had; the sentence names the option of `unbroken up`."""
    _check_distinct(config)
    for option, what, port in _ports(config):
        address = join(config.host, port)
        if (error := bind_error(address)) is not None:
            raise cannot_listen(what, address, error, option=option)


def _check_distinct(config: ClusterConfig) -> None:
    takers: dict[int, str] = {}
    for option, what, port in _ports(config):
        if port > PORT_MAX:
            raise StartupError(f"{option} is too high: {what} would need port {port}")
        if port in takers:
            raise StartupError(f"{takers[port]} and {what} both need port {port}: give another {option}")
        if port:
            takers[port] = what


def _ports(config: ClusterConfig) -> Iterator[tuple[str, str, int]]:
    """Option, who listens there, port."""
    yield "--registry-port", "the registry", config.registry_port
    for index in range(config.frontends):
        yield "--grpc-port", f"gRPC of frontend-{index + 1}", port_of(config.grpc_port, index)
        yield "--http-port", f"HTTP of frontend-{index + 1}", port_of(config.http_port, index)
