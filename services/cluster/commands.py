"""Command lines and listen addresses of the processes of a local cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.runtime.address import PORT_MAX
from services.runtime.listen import bind_error, cannot_listen
from services.runtime.process import StartupError
from services.runtime.supervision.program import PROGRAM

LOOPBACK = "127.0.0.1"
WILDCARDS = {"0.0.0.0": LOOPBACK, "[::]": "[::1]"}
"""Wildcard address → the loopback address by which a process on this machine reaches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Which processes to run, and their options. Each frontend after the first takes the next port; with port 0 the
    system chooses. `is_tls`: frontends serve their clients over TLS. `certs`: a folder of `unbroken certs`, whose
    certificates all processes use."""

    workers: int = 2
    frontends: int = 1
    engine: str = "mocker"
    model: str | None = None
    served_model_name: str | None = None
    host: str = LOOPBACK
    registry_port: int = 50050
    grpc_port: int = 50051
    http_port: int = 8000
    migration_limit: int = 3
    worker_options: tuple[str, ...] = ()
    log_level: str = "info"
    log_format: str = "text"
    is_tls: bool = False
    certs: Path | None = None


def registry_command(config: ClusterConfig, ready_file: Path, last: Mapping[str, str]) -> Sequence[str]:
    """A registry with its store in memory. A restarted registry listens at the address in `last`."""
    listen = last.get("address") or join(config.host, config.registry_port)
    return [*_common("registry", config, ready_file), "--store=memory", f"--listen={listen}"]


def worker_command(config: ClusterConfig, ready_file: Path, *, registry: str) -> Sequence[str]:
    """A worker for the frontends on this machine, on a free port."""
    named = {"--model": config.model, "--served-model-name": config.served_model_name}
    return [
        *_common("worker", config, ready_file),
        f"--listen={join(LOOPBACK, 0)}",
        "--metrics-port=0",
        f"--registry={reachable(registry)}",
        f"--engine={config.engine}",
        *(f"{option}={value}" for option, value in named.items() if value is not None),
        *config.worker_options,
    ]


def frontend_command(
    config: ClusterConfig, index: int, ready_file: Path, last: Mapping[str, str], *, registry: str
) -> Sequence[str]:
    """Frontend `index`, from 0. A restarted frontend listens at the addresses in `last`."""
    grpc = last.get("grpc") or join(config.host, port_of(config.grpc_port, index))
    http = last.get("http") or join(config.host, port_of(config.http_port, index))
    return [
        *_common("frontend", config, ready_file),
        f"--grpc-listen={grpc}",
        f"--http-listen={http}",
        f"--registry={reachable(registry)}",
        f"--migration-limit={config.migration_limit}",
        *_edge_options(config.certs),
    ]


def _common(subcommand: str, config: ClusterConfig, ready_file: Path) -> list[str]:
    logs = [f"--log-level={config.log_level}", f"--log-format={config.log_format}"]
    return [*PROGRAM, subcommand, *logs, f"--ready-file={ready_file}", *_peer_options(subcommand, config.certs)]


def _peer_options(role: str, certs: Path | None) -> list[str]:
    if certs is None:
        return []
    return [f"--peer-cert={certs / role}.pem", f"--peer-key={certs / role}.key", f"--peer-ca={certs / 'ca.pem'}"]


def _edge_options(certs: Path | None) -> list[str]:
    return [] if certs is None else [f"--tls-cert={certs / 'edge.pem'}", f"--tls-key={certs / 'edge.key'}"]


def port_of(first: int, index: int) -> int:
    """The port of frontend `index`, from 0. `first`: the port of frontend 0; with 0 every frontend gets a free port."""
    return first + index if first else 0


def join(host: str, port: int) -> str:
    """Join host and port; an IPv6 host gets brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(address: str) -> str:
    """The address by which a process on this machine connects to the listen address `address`."""
    host, _, port = address.rpartition(":")
    return f"{WILDCARDS.get(host, host)}:{port}"


def check_ports(config: ClusterConfig) -> None:
    """Check that every port is free. Raises StartupError; its text names the option of `unbroken up`."""
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
    """Yield (option, what listens there, port) for each listener."""
    yield "--registry-port", "the registry", config.registry_port
    for index in range(config.frontends):
        yield "--grpc-port", f"gRPC of frontend-{index + 1}", port_of(config.grpc_port, index)
        yield "--http-port", f"HTTP of frontend-{index + 1}", port_of(config.http_port, index)
