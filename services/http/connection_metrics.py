"""Metrics of the connections of a process, and how many it takes."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.http.server.clients import Clients
from services.runtime.descriptors.limit import connections_max, limit
from services.tls.watch import WatchedCertificate


class ConnectionMetrics(Collector):
    """The open connections of all servers of a process, and the limit that they have together."""

    def __init__(self, prefix: str, servers: Sequence[Clients]) -> None:
        """`servers`: the connections of each server. It may grow."""
        self._prefix = prefix
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        text = "Open connections of clients."
        yield GaugeMetricFamily(f"{self._prefix}_connections", text, sum(map(len, self._servers)))
        text = "Connections that the limit of open files leaves room for; further ones are refused."
        yield GaugeMetricFamily(f"{self._prefix}_connections_limit", text, connections_max(limit()))


class TlsMetrics(Collector):
    """The certificate of the ports of a process, and the handshakes that failed there."""

    def __init__(self, prefix: str, pair: WatchedCertificate[Any]) -> None:
        self._prefix = prefix
        self._pair = pair

    def collect(self) -> Iterator[Metric]:
        text = "When the certificate expires, in seconds since the epoch."
        expires_at = self._pair.loaded.certificate.expires_at
        yield GaugeMetricFamily(f"{self._prefix}_tls_certificate_expiry_timestamp_seconds", text, expires_at)
        text = "TLS handshakes that failed, besides those of clients that just left."
        yield CounterMetricFamily(f"{self._prefix}_tls_handshakes_failed", text, self._pair.failures)
