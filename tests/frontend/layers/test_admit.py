"""Admit: a request that no worker has room for is rejected before any work is done on it."""

import random
from typing import Any

import pytest

from services.core.errors import Failure, Reason
from services.core.tenant import Tenant
from services.discovery.client import InstanceRecord
from services.frontend.layers.admit import Admit
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.balancer import Balancer
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import FakePool, Script, call_layer, make_candidate, make_request, models_of, run_async

BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
HALF = AdmissionConfig(is_on=True, thresholds=Thresholds(active_decode_blocks=0.5))


def admit(script: Script, catalog: ModelCatalog, *workers: Candidate) -> Admit:
    return Admit(script, catalog, FakePool(*workers), Balancer(BusyThresholds(HALF), random.Random(0)))


def ask(*workers: Candidate, **request: Any) -> Script:
    script = Script([7])
    layer = admit(script, models_of(), *workers)
    run_async(call_layer(layer, make_request(**request), card=None))
    return script


def refusal(*workers: Candidate, **request: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        ask(*workers, **request)
    return caught.value


def test_a_request_passes_if_a_worker_has_room_and_no_worker_is_chosen_yet() -> None:
    script = ask(make_candidate("a", is_full=True), make_candidate("b"))

    assert script.requests == [make_request()]
    assert script.calls[0].attempt.worker is None


def test_a_model_that_the_tenant_may_not_use_does_not_exist_for_it() -> None:
    script, tenant = Script([7]), Tenant(name="acme", models=frozenset({"another"}))
    layer = admit(script, models_of(), make_candidate("a"))

    with pytest.raises(Failure) as caught:
        run_async(call_layer(layer, make_request(), card=None, tenant=tenant))

    assert caught.value.reason is Reason.MODEL_NOT_FOUND
    assert caught.value.detail == f"there is no model {make_request().model!r}; known: none so far"
    assert script.requests == []


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], Reason.NO_WORKERS),
        ([make_candidate("a", is_full=True)], Reason.OVERLOADED),
        ([make_candidate("a", ranks=[BUSY])], Reason.OVERLOADED),
    ],
)
def test_a_request_is_rejected_with_the_balancers_reason_if_no_worker_is_eligible(
    workers: list[Candidate], reason: Reason
) -> None:
    failure = refusal(*workers)

    assert failure.reason is reason
    assert failure.retry_after_s is not None


def test_a_model_whose_workers_were_never_reached_has_no_workers() -> None:
    """A bug: clients got MODEL_NOT_FOUND, which says not to try again."""
    catalog = ModelCatalog()
    catalog.note_registered([InstanceRecord("a", "x:1", "m")], [])
    layer = admit(Script(), catalog)

    with pytest.raises(Failure) as caught:
        run_async(call_layer(layer, make_request(), card=None))

    assert caught.value.reason is Reason.NO_WORKERS
    assert "(registered: 1)" in caught.value.detail
    assert caught.value.retry_after_s is not None


def test_a_request_needs_room_for_all_its_choices() -> None:
    worker = make_candidate("a", slots=4, in_flight_count=2)

    assert ask(worker, n=2).requests[0].n == 2
    assert refusal(worker, n=3).reason is Reason.OVERLOADED
    assert refusal(worker, n=5).param == "n"


@pytest.mark.parametrize("is_part", [False, True])
def test_choices_that_continue_after_tokens_of_their_own_need_room_one_by_one(is_part: bool) -> None:
    """A client that continues an answer would otherwise be refused by workers that had been full of its choices."""
    worker = make_candidate("a", slots=4, in_flight_count=3)
    request: dict[str, Any] = {"n": 3, "generated_choices": ((1,), None, ())}

    if is_part:
        request = {"n": 3, "token_ids": None, "parts": (make_request(**request),)}

    assert ask(worker, **request).requests


def test_an_unknown_model_is_rejected() -> None:
    assert refusal(model="other").reason is Reason.MODEL_NOT_FOUND


def test_rejections_before_the_first_view_are_spread_over_time() -> None:
    layer = admit(Script(), ModelCatalog())
    failures = []
    for _ in range(20):
        with pytest.raises(Failure) as caught:
            run_async(call_layer(layer, make_request(), card=None))
        failures.append(caught.value)

    assert {failure.reason for failure in failures} == {Reason.NO_WORKERS}
    assert len({failure.retry_after_s for failure in failures}) == 20
