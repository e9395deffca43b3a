"""Admit: what no worker has room for is refused before any work is done on it."""

import random
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.discovery.client import InstanceRecord
from services.frontend.layers.admit import Admit
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import FakeWorker, FakeWorkers, Script, call_layer, make_request, models_of, run_async

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
HALF = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))


def ask(*workers: FakeWorker, **request: Any) -> Script:
    script = Script([7])
    layer = Admit(script, models_of(), FakeWorkers(*workers), BusyThresholds(HALF), random.Random(0))
    run_async(call_layer(layer, make_request(**request), card=None))
    return script


def refusal(*workers: FakeWorker, **request: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        ask(*workers, **request)
    return caught.value


def test_lets_through_what_some_worker_has_room_for() -> None:
    script = ask(FakeWorker("a", full=True), FakeWorker("b"))

    assert script.requests == [make_request()]
    assert script.calls[0].attempt.worker is None


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], Reason.NO_WORKERS),
        ([FakeWorker("a", full=True)], Reason.OVERLOADED),
        ([FakeWorker("a", reported=[BUSY])], Reason.OVERLOADED),
    ],
)
def test_refuses_as_route_would(workers: list[FakeWorker], reason: Reason) -> None:
    failure = refusal(*workers)

    assert failure.reason is reason
    assert failure.retry_after_s is not None


def test_a_model_whose_workers_were_never_reached_is_no_wrong_name() -> None:
    """Clients were told that it does not exist, and not to try again."""
    catalog = ModelCatalog()
    catalog.note_registered([InstanceRecord("a", "x:1", "m")], [])
    layer = Admit(Script(), catalog, FakeWorkers(), BusyThresholds(HALF), random.Random(0))

    with pytest.raises(Failure) as caught:
        run_async(call_layer(layer, make_request(), card=None))

    assert caught.value.reason is Reason.NO_WORKERS
    assert "of 1 registered" in caught.value.detail
    assert caught.value.retry_after_s is not None


def test_counts_all_choices() -> None:
    worker = FakeWorker("a", request_limit=4, in_flight_count=2)

    assert ask(worker, n=2).requests[0].n == 2
    assert refusal(worker, n=3).reason is Reason.OVERLOADED
    assert refusal(worker, n=5).param == "n"


def test_leaves_it_to_preprocess_to_say_that_there_is_no_such_model() -> None:
    assert ask(model="other").requests[0].model == "other"
