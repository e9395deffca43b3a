"""The order of the frontend's layers: for each pair of neighbours a scenario fails if they are swapped."""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from services.core.call import Call
from services.core.common_layers import stack
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.generation.presentation import decode_presentation
from services.core.interface import Layer, Usage
from services.core.request import Request, Sampling, Stop
from services.core.tenant import Tenant
from services.discovery.client import InstanceRecord
from services.frontend.limits.tenant_limits import TenantLimits
from services.frontend.metrics.definitions import build_metrics
from services.frontend.model_catalog import Model, ModelCatalog
from services.frontend.pipeline import PipelineConfig, frontend_layers
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.frontend.routing.worker_set import WorkerSet
from services.models.prompt_encoder import PromptEncoder
from services.models.tokenizers.byte_level import ByteTokenizer
from tests.support.doubles import (
    CARD,
    FakePool,
    Script,
    call_layer,
    encoder_of,
    make_candidate,
    make_kept,
    make_request,
    models_of,
    run_async,
)

SWAP_S_MAX = 1.0


class Plane:
    """A frontend's pipeline above a script, optionally with two neighbouring layers swapped."""

    def __init__(self, script: Script, swapped: int | None, **parts: Any) -> None:
        self.script = script
        self.metrics = build_metrics()
        self.workers = FakePool(make_candidate("a"), make_candidate("b"))
        given: dict[str, Any] = {
            "catalog": models_of(),
            "pool": self.workers,
            "metrics": self.metrics,
            "busy": BusyThresholds(AdmissionConfig()),
            "gate": Gate(),
            "rng": random.Random(0),
            "limits": TenantLimits(lambda: 1, random.Random(0)),
        }
        layers = frontend_layers(PipelineConfig(), **(given | parts))
        if swapped is not None:
            layers[swapped], layers[swapped + 1] = layers[swapped + 1], layers[swapped]
        self.names = [layer.func.__name__ if isinstance(layer, partial) else layer.__name__ for layer in layers]
        self.call: Layer = stack(*layers, innermost=script)

    def counted(self, error_type: str) -> float | None:
        labels = {
            "model": "m",
            "endpoint": "generate",
            "request_type": "stream",
            "status": "error",
            "error_type": error_type,
        }
        return self.metrics.registry.get_sample_value("dynamo_frontend_requests_total", labels)


async def bug_is_counted_as_the_internal_error_that_the_client_sees(swapped: int | None) -> None:
    plane = Plane(Script([ValueError("bug")]), swapped)

    failure = await failure_of(plane, make_request())
    await asyncio.sleep(0)  # Outcomes are counted in the next iteration.

    assert failure.reason is Reason.INTERNAL
    assert plane.counted("INTERNAL") == 1


async def bug_in_the_gate_is_an_internal_error(swapped: int | None) -> None:
    class BrokenGate(Gate):
        def enter(self, call: Call) -> None:
            raise ValueError("bug")

    plane = Plane(Script(), swapped, gate=BrokenGate())

    assert (await failure_of(plane, make_request())).reason is Reason.INTERNAL


ONCE = Tenant(name="acme", requests_per_minute=1)


async def draining_process_answers_draining_even_to_a_tenant_that_has_nothing_left(swapped: int | None) -> None:
    gate = Gate()
    plane = Plane(Script([97]), swapped, gate=gate)
    await call_layer(plane.call, make_request(), tenant=ONCE)
    gate.is_draining = True

    assert (await failure_of(plane, make_request(), tenant=ONCE)).reason is Reason.DRAINING


async def tenant_that_has_nothing_left_is_told_so_even_without_capacity(swapped: int | None) -> None:
    workers = FakePool(make_candidate("a"))
    plane = Plane(Script([97]), swapped, pool=workers)
    await call_layer(plane.call, make_request(), tenant=ONCE)
    workers._worker_set = WorkerSet(CARD)

    assert (await failure_of(plane, make_request(), tenant=ONCE)).reason is Reason.RATE_LIMITED


async def refusal_for_lack_of_capacity_sets_no_timer(swapped: int | None) -> None:
    plane = Plane(Script(), swapped, pool=FakePool(make_candidate("a", is_full=True)))

    failure, timers = await refused_with_timers(plane)

    assert failure.reason is Reason.OVERLOADED
    assert timers == 0


async def deadline_covers_the_time_in_the_tokeniser(swapped: int | None) -> None:
    class SlowEncoder(PromptEncoder):
        async def token_ids(self, *_: object, **__: object) -> tuple[int, ...]:
            await asyncio.sleep(SWAP_S_MAX * 2)
            raise AssertionError("not cancelled")

    encoder = encoder_of(ByteTokenizer())
    catalog = ModelCatalog()
    catalog.add(Model(CARD, SlowEncoder(encoder.tokenizer, encoder._pool)))
    plane = Plane(Script(), swapped, catalog=catalog)
    request = Request(model="m", text="four", stop=Stop(max_tokens=1))
    async with asyncio.timeout(SWAP_S_MAX):
        failure = await failure_of(plane, request, deadline=asyncio.get_running_loop().time() + 0.05)

    assert failure.reason is Reason.DEADLINE_EXCEEDED


async def what_is_kept_is_the_request_as_it_was_prepared(swapped: int | None) -> None:
    plane = Plane(Script([97]), swapped)
    request = Request(model="m", text="hi", stop=Stop(max_tokens=1))

    await call_layer(plane.call, request, kept=make_kept())

    of_script = plane.script.calls[0].kept
    assert of_script is not None
    assert decode_presentation(of_script.generation.presentation).request.token_ids == tuple(b"hi")


async def each_prompt_keeps_what_the_whole_answer_needs(swapped: int | None) -> None:
    plane = Plane(Script([97], [97]), swapped)
    parts = (make_request((1,)), make_request((2,)))

    await call_layer(plane.call, make_request(token_ids=None, parts=parts), kept=make_kept())

    for call in plane.script.calls:
        assert call.kept is not None
        assert len(decode_presentation(call.kept.generation.presentation).request.parts) == 2


async def each_prompt_has_its_own_choices(swapped: int | None) -> None:
    plane = Plane(Script([97], [97], [97], [97]), swapped)
    parts = (make_request((1,), n=2), make_request((1, 2), n=2))

    result = await call_layer(plane.call, make_request(token_ids=None, parts=parts, n=2))

    assert sorted(delta.choice for delta in result.deltas if delta.token_ids) == [0, 1, 2, 3]
    assert result.finish is not None
    assert result.finish.usage == Usage(3, 4)


async def each_choice_has_its_own_text(swapped: int | None) -> None:
    first, second, third = "漢".encode()
    plane = Plane(Script([first, second, third], [first, second, third]), swapped)

    result = await call_layer(plane.call, make_request(n=2))

    for choice in (0, 1):
        assert "".join(delta.text for delta in result.deltas if delta.choice == choice) == "漢"


async def answer_that_migrate_completes_still_shows_all_its_text(swapped: int | None) -> None:
    plane = Plane(Script([*b"a st", Reason.DISCONNECTED]), swapped)

    result = await call_layer(plane.call, make_request(max_tokens=4, strings=("stop",)))

    assert result.text == "a st"
    assert result.finish is not None
    assert result.finish.usage == Usage(2, 4)


async def each_attempt_may_choose_another_worker(swapped: int | None) -> None:
    plane = Plane(Script([97, Reason.DISCONNECTED], [98]), swapped)

    await call_layer(plane.call, make_request())

    assert {call.attempt.worker for call in plane.script.calls} == {"a", "b"}


PAIRS = [
    ("Observe", "Guard", bug_is_counted_as_the_internal_error_that_the_client_sees),
    ("Guard", "Accept", bug_in_the_gate_is_an_internal_error),
    ("Accept", "Limit", draining_process_answers_draining_even_to_a_tenant_that_has_nothing_left),
    ("Limit", "Admit", tenant_that_has_nothing_left_is_told_so_even_without_capacity),
    ("Admit", "Deadline", refusal_for_lack_of_capacity_sets_no_timer),
    ("Deadline", "Preprocess", deadline_covers_the_time_in_the_tokeniser),
    ("Preprocess", "Keep", what_is_kept_is_the_request_as_it_was_prepared),
    ("Keep", "Prompts", each_prompt_keeps_what_the_whole_answer_needs),
    ("Prompts", "Choices", each_prompt_has_its_own_choices),
    ("Choices", "Detokenize", each_choice_has_its_own_text),
    ("Detokenize", "Migrate", answer_that_migrate_completes_still_shows_all_its_text),
    ("Migrate", "Route", each_attempt_may_choose_another_worker),
]
Scenario = Callable[[int | None], Coroutine[Any, Any, None]]


async def failure_of(plane: Plane, request: Request, **call: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        await call_layer(plane.call, request, **call)
    return caught.value


async def refused_with_timers(plane: Plane) -> tuple[Failure, int]:
    """The failure of a request with a deadline, and the number of timers that were set for it."""
    loop = asyncio.get_running_loop()
    timers, call_at = [], loop.call_at
    loop.call_at = lambda when, *args, **kwargs: timers.append(when) or call_at(when, *args, **kwargs)  # type: ignore[func-returns-value, method-assign]
    return await failure_of(plane, make_request(), deadline=loop.time() + 60), len(timers)


def test_without_keys_nothing_is_counted_for_tenants() -> None:
    assert "Limit" not in Plane(Script(), None, limits=None).names


async def refused_twice() -> list[Reason]:
    plane = Plane(Script(), None, pool=FakePool())
    return [(await failure_of(plane, make_request(), tenant=ONCE)).reason for _ in range(2)]


def test_request_that_finds_no_worker_is_given_back_to_its_tenant() -> None:
    assert run_async(refused_twice()) == [Reason.NO_WORKERS] * 2


def test_every_pair_of_neighbours_has_a_scenario() -> None:
    names = Plane(Script(), None).names

    assert list(itertools.pairwise(names)) == [(above, below) for above, below, _ in PAIRS]


@pytest.mark.parametrize("scenario", [pair[2] for pair in PAIRS], ids=lambda scenario: scenario.__name__)
def test_scenario_passes_with_the_layers_in_order(scenario: Scenario) -> None:
    run_async(scenario(None))


@pytest.mark.parametrize(("index", "scenario"), list(enumerate(pair[2] for pair in PAIRS)))
def test_scenario_fails_with_the_two_layers_swapped(index: int, scenario: Scenario) -> None:
    with pytest.raises((AssertionError, Failure, TimeoutError, ValueError, pytest.fail.Exception)):
        run_async(scenario(index))


def test_model_with_registered_but_unreachable_workers_is_counted_by_its_name() -> None:
    async def scenario() -> None:
        catalog = ModelCatalog()
        catalog.note_registered([InstanceRecord("a", "x:1", "m")], [])
        plane = Plane(Script(), None, catalog=catalog)
        assert (await failure_of(plane, Request(model="m", text="four"))).reason is Reason.NO_WORKERS
        await asyncio.sleep(0)
        assert plane.counted("NO_WORKERS") == 1

    run_async(scenario())


def test_unset_sampling_is_settled_once_for_all_attempts() -> None:
    async def scenario() -> None:
        plane = Plane(Script([97, Reason.DISCONNECTED], [98]), None)
        await call_layer(plane.call, make_request(sampling=Sampling()))
        first, second = plane.script.requests
        assert first.sampling == second.sampling
        assert first.sampling.seed is not None

    run_async(scenario())


@pytest.mark.parametrize(
    ("workers", "reason"), [([], Reason.NO_WORKERS), ([make_candidate("a", is_full=True)], Reason.OVERLOADED)]
)
def test_request_refused_for_lack_of_capacity_is_not_tokenised(workers: list[Candidate], reason: Reason) -> None:
    class NoTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
            raise AssertionError("tokenised")

    async def scenario() -> None:
        catalog = ModelCatalog()
        catalog.add(Model(CARD, encoder_of(NoTokenizer())))
        plane = Plane(Script(), None, catalog=catalog, pool=FakePool(*workers))
        assert (await failure_of(plane, Request(model="m", text="four"))).reason is reason

    run_async(scenario())


def test_prompt_is_tokenised_once_for_all_choices() -> None:
    texts: list[str] = []

    class CountingTokenizer(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
            texts.append(text)
            return super().encode(text, add_special=add_special)

    catalog = ModelCatalog()
    catalog.add(Model(CARD, encoder_of(CountingTokenizer())))
    plane = Plane(Script([97], [97]), None, catalog=catalog)

    result = run_async(call_layer(plane.call, Request(model="m", text="four", n=2)))

    assert texts == ["four"]
    assert result.finish is not None
    assert result.finish.usage == Usage(4, 2)


def test_no_prompt_is_answered_before_all_are_valid() -> None:
    async def scenario() -> None:
        plane = Plane(Script([97], [97]), None)
        parts = (make_request(), make_request((999_999,)))

        failure = await failure_of(plane, make_request(token_ids=None, parts=parts))

        assert (failure.reason, failure.param) == (Reason.INVALID_ARGUMENT, "prompt[1]")
        assert not plane.script.requests

    run_async(scenario())
