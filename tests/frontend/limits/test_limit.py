"""Limit: a tenant is charged what it is served, and refused when it has nothing left."""

import asyncio
import random
from typing import Any

import pytest

from services.core.call import Told
from services.core.errors import Failure, Reason
from services.core.interface import Layer
from services.core.tenant import Tenant
from services.frontend.limits.limit import CHARACTERS_PER_TOKEN, Limit
from services.frontend.limits.tenant_limits import TenantLimits
from tests.support.doubles import HANG, Script, call_layer, make_kept, make_request, run_async

TENANT = Tenant(name="acme", requests_per_minute=100, tokens_per_minute=1000, requests_at_once=2)


class Preparing:
    """Tells the prompt, as Preprocess does."""

    def __init__(self, inner: Layer) -> None:
        self._inner = inner

    async def __call__(self, request: Any, call: Any, sink: Any) -> Any:
        call.told.prompts = [request.token_ids or (0,) * 30]
        return await self._inner(request, call, sink)


class Plane:
    """The layer above a script. `left`: what the tenant has left."""

    def __init__(self, *takes: Any) -> None:
        self.limits = TenantLimits(lambda: 1, random.Random(0), lambda: 0.0)
        self.script = Script(*takes)
        self.layer = Limit(Preparing(self.script), self.limits)

    def ask(self, tenant: Tenant = TENANT, **fields: Any) -> Any:
        call = {name: fields.pop(name) for name in ("kept", "told") if name in fields}
        return call_layer(self.layer, make_request(**fields), tenant=tenant, **call)

    @property
    def left(self) -> dict[str, int]:
        return {one.name: one.remaining for one in self.limits.allowances(TENANT)}


def test_prompt_and_answer_are_charged() -> None:
    plane = Plane([1, 2, b"abc"])

    result = run_async(plane.ask(prompt=(1, 2, 3, 4)))

    assert sum(len(one.token_ids) for one in result.deltas) == 5
    assert plane.left == {"requests": 99, "tokens": 1000 - 4 - 5}


def test_text_is_charged_by_its_length_until_it_is_tokenised() -> None:
    seen: list[dict[str, int]] = []

    class Looking(Preparing):
        async def __call__(self, request: Any, call: Any, sink: Any) -> Any:
            seen.append(plane.left)
            return await super().__call__(request, call, sink)

    plane = Plane([1])
    plane.layer = Limit(Looking(plane.script), plane.limits)

    run_async(plane.ask(token_ids=None, text="x" * 40 * CHARACTERS_PER_TOKEN))

    assert seen == [{"requests": 99, "tokens": 1000 - 41}]
    assert plane.left["tokens"] == 1000 - 30 - 1


@pytest.mark.parametrize(
    ("outcome", "left"),
    [
        (Reason.OVERLOADED, {"requests": 100, "tokens": 1000}),
        (Reason.NO_WORKERS, {"requests": 100, "tokens": 1000}),
        (Reason.DEADLINE_EXCEEDED, {"requests": 99, "tokens": 998}),
        (Reason.INVALID_ARGUMENT, {"requests": 99, "tokens": 998}),
    ],
)
def test_request_is_given_back_only_if_it_may_come_again(outcome: Reason, left: dict[str, int]) -> None:
    plane = Plane([outcome])

    with pytest.raises(Failure):
        run_async(plane.ask())

    assert plane.left == left


def test_answer_that_breaks_off_is_charged() -> None:
    plane = Plane([7, Reason.OVERLOADED])

    with pytest.raises(Failure):
        run_async(plane.ask())

    assert plane.left == {"requests": 99, "tokens": 1000 - 2 - 1}


def test_request_that_was_never_tokenised_costs_no_tokens() -> None:
    plane = Plane()

    async def refuse(*_: object) -> Any:
        raise Failure(Reason.PROMPT_TOO_LONG, "no")

    plane.layer = Limit(refuse, plane.limits)

    with pytest.raises(Failure):
        run_async(plane.ask(token_ids=None, text="x" * 400))

    assert plane.left == {"requests": 99, "tokens": 1000}


def test_answer_that_uses_up_the_tokens_is_finished_and_the_next_request_waits() -> None:
    plane = Plane([bytes(5000)], [1])

    result = run_async(plane.ask())
    with pytest.raises(Failure) as caught:
        run_async(plane.ask())

    assert len(result.deltas[0].token_ids) == 5000
    assert caught.value.reason is Reason.RATE_LIMITED
    assert caught.value.retry_after_s == pytest.approx(60 * (4002 + 1) / 1000)


def test_client_that_leaves_makes_room_for_another() -> None:
    async def scenario() -> None:
        plane = Plane([HANG], [HANG], [1])
        tasks = [asyncio.ensure_future(plane.ask()) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Failure) as caught:
            await plane.ask()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await plane.ask()

        assert caught.value.metadata["cause"] == "requests_at_once"

    run_async(scenario())


def test_resumed_answer_is_charged_only_what_is_delivered_again() -> None:
    plane, kept = Plane([1, 2]), make_kept()
    kept.generation.is_resumed = True

    run_async(plane.ask(kept=kept))

    assert plane.left == {"requests": 100, "tokens": 998}


def test_client_is_told_what_is_left_whether_it_is_served_or_not() -> None:
    plane, told = Plane([1]), [Told(), Told()]
    narrow = Tenant(name="acme", requests_per_minute=1)

    run_async(plane.ask(narrow, told=told[0]))
    with pytest.raises(Failure):
        run_async(plane.ask(narrow, told=told[1]))

    assert [(one.name, one.limit, one.remaining) for each in told for one in each.allowances] == [
        ("requests", 1, 0),
        ("requests", 1, 0),
    ]


def test_tenant_without_limits_is_not_counted() -> None:
    plane, told = Plane([1]), Told()

    run_async(plane.ask(Tenant(name="free"), told=told))

    assert plane.limits._states == {}
    assert told.allowances == ()
