"""Metrics of a server's gRPC connections. gRPC closes those beyond its bound without telling anybody."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rpc.server import GrpcServer


class ConnectionMetrics(Collector):
    """The connections to a gRPC server, and how many it takes."""

    def __init__(self, prefix: str, server: GrpcServer) -> None:
        self._prefix = prefix
        self._server = server

    def collect(self) -> Iterator[Metric]:
        text = "Connections of clients over gRPC."
        yield GaugeMetricFamily(f"{self._prefix}_grpc_connections", text, self._server.connection_count())
        text = "Connections over gRPC that the server takes; further ones are closed."
        yield GaugeMetricFamily(f"{self._prefix}_grpc_connections_limit", text, self._server.connections_max)
