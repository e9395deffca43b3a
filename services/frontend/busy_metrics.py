"""What a frontend tells Prometheus of the thresholds at which workers count as busy."""

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.busy import THRESHOLDS, BusyThresholds
from services.frontend.catalogue import Catalogue


class BusyMetrics(Collector):
    """Read when somebody scrapes it. A threshold that is not set has no value."""

    def __init__(self, catalogue: Catalogue, thresholds: BusyThresholds, prefix: str) -> None:
        self._catalogue = catalogue
        self._thresholds = thresholds
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        text = "Thresholds as they are set now; they act only with --admission-control token-capacity."
        family = GaugeMetricFamily(f"{self._prefix}_model_busy_threshold", text, labels=["model", "threshold"])
        for model in self._catalogue.names():
            thresholds = self._thresholds.of(model)
            for name in THRESHOLDS.values():
                if (value := getattr(thresholds, name)) is not None:
                    family.add_metric([model, name], value)
        yield family
