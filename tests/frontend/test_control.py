"""LocalControl acts on this process, and Canceller also on kept answers of other frontends."""

from prometheus_client import CollectorRegistry, Counter

from services.core.call import Call
from services.core.gate import Gate
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.control import Canceller, LocalControl
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from tests.frontend.support import alone
from tests.support.doubles import run_async

ID = "000102030405060708090a0b0c0d0e0f"


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
        return [await control.cancel(name, EVERYBODY) for name in ("mine", "mine", "another")]

    assert run_async(scenario()) == [2, 0, 0]


def test_set_thresholds_changes_only_the_given_ones() -> None:
    thresholds = BusyThresholds(AdmissionConfig(thresholds=Thresholds(active_decode_blocks=0.5)))
    control = LocalControl(CollectorRegistry(), Gate(), thresholds)

    run_async(control.set_thresholds("m", {"active_prefill_tokens_threshold": 7}))

    assert thresholds.of("m") == Thresholds(active_decode_blocks=0.5, active_prefill_tokens=7)


class Kept:
    """One kept answer, which runs elsewhere."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    async def cancel(self, generation_id: bytes, tenant: Tenant) -> bool:
        self.asked.append(generation_id)
        return len(self.asked) == 1


def test_request_that_does_not_run_here_is_cancelled_by_the_id_of_its_answer() -> None:
    kept, control = Kept(), alone()
    canceller = Canceller(control, kept)

    async def scenario() -> list[int]:
        return [await canceller.cancel(f"chatcmpl-{ID}", EVERYBODY), await canceller.cancel(ID, EVERYBODY)]

    assert run_async(scenario()) == [1, 0]
    assert kept.asked == [bytes.fromhex(ID)] * 2


def test_workers_are_not_asked_for_requests_that_run_here_or_whose_ids_no_answer_has() -> None:
    kept, gate = Kept(), Gate()
    canceller = Canceller(alone(gate=gate), kept)

    async def scenario() -> list[int]:
        gate.enter(Call(request_id=ID))
        return [await canceller.cancel(ID, EVERYBODY), await canceller.cancel("another", EVERYBODY)]

    assert run_async(scenario()) == [1, 0]
    assert kept.asked == []
