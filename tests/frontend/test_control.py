"""LocalControl acts on this process: its metrics, its running requests and its thresholds."""

from prometheus_client import CollectorRegistry, Counter

from services.core.call import Call
from services.core.gate import Gate
from services.frontend.control import LocalControl
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from tests.support.doubles import run_async


def test_exposition_contains_the_metrics_of_this_process() -> None:
    registry = CollectorRegistry()
    Counter("requests", "Requests.", registry=registry).inc(3)
    control = LocalControl(registry, Gate(), BusyThresholds(AdmissionConfig()))

    assert b"requests_total 3.0" in run_async(control.exposition())


def test_cancel_ends_the_requests_with_that_id_and_returns_their_number() -> None:
    async def scenario() -> list[int]:
        gate = Gate()
        gate.enter(Call(request_id="mine"))
        gate.enter(Call(request_id="mine"))
        control = LocalControl(CollectorRegistry(), gate, BusyThresholds(AdmissionConfig()))
        return [await control.cancel("mine"), await control.cancel("mine"), await control.cancel("another")]

    assert run_async(scenario()) == [2, 0, 0]


def test_set_thresholds_changes_only_the_given_ones() -> None:
    thresholds = BusyThresholds(AdmissionConfig(thresholds=Thresholds(active_decode_blocks=0.5)))
    control = LocalControl(CollectorRegistry(), Gate(), thresholds)

    run_async(control.set_thresholds("m", {"active_prefill_tokens_threshold": 7}))

    assert thresholds.of("m") == Thresholds(active_decode_blocks=0.5, active_prefill_tokens=7)
