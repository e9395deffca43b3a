"""The frontend's metrics of thresholds: those that are set, as they are now."""

from prometheus_client import CollectorRegistry

from services.frontend.busy import AdmissionConfig, BusyThresholds, Thresholds
from services.frontend.busy_metrics import BusyMetrics
from tests.support import models_of


def test_tells_the_thresholds_that_are_set_and_no_others() -> None:
    thresholds = BusyThresholds(AdmissionConfig(thresholds=Thresholds(active_decode_blocks=0.9)))
    registry = CollectorRegistry()
    registry.register(BusyMetrics(models_of(), thresholds, "dynamo_frontend"))

    def value(threshold: str) -> float | None:
        labels = {"model": "m", "threshold": threshold}
        return registry.get_sample_value("dynamo_frontend_model_busy_threshold", labels)

    before = [value("active_decode_blocks"), value("active_prefill_tokens")]
    thresholds.set("m", Thresholds(active_prefill_tokens=0))
    after = [value("active_decode_blocks"), value("active_prefill_tokens")]

    assert before == [0.9, None]
    assert after == [None, 0], "0 is a threshold"
