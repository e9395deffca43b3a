"""Capacity: a worker is full for what it refused and beyond its request limit, until an event leaves room."""

import asyncio

import pytest

from services.core.errors import Reason, RefusedFor
from services.core.tenant import EVERYBODY, Tenant
from services.frontend.routing.capacity import Capacity, Refusal, had_place
from services.stubs import worker_pb2
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import run_async


@pytest.mark.parametrize(
    ("reason", "cause", "had"),
    [
        (Reason.WORKER_AT_CAPACITY, RefusedFor.CAPACITY, False),
        (Reason.WORKER_AT_CAPACITY, RefusedFor.QUEUE_TOKENS, False),
        (Reason.WORKER_AT_CAPACITY, RefusedFor.TENANT_SHARE, False),
        (Reason.WORKER_AT_CAPACITY, None, False),
        (Reason.WORKER_AT_CAPACITY, RefusedFor.QUEUE_TIMEOUT, True),
        (Reason.ENGINE_ERROR, None, True),
    ],
)
def test_a_request_had_a_place_unless_it_was_refused_at_once(reason: str, cause: str | None, had: bool) -> None:
    assert had_place(reason, cause) is had


def test_a_request_that_waited_too_long_is_no_reason_to_count_as_full() -> None:
    async def scenario() -> None:
        capacity = Capacity(60, lambda: None)
        capacity.on_refused(RefusedFor.QUEUE_TIMEOUT, 1, 5)
        assert not capacity.is_full(1, 5)

    run_async(scenario())


@pytest.mark.parametrize(("slots", "places", "limit"), [(4, 2, 6), (4, 0, 4), (0, 0, None)])
def test_the_request_limit_is_the_sum_of_slots_and_places_if_the_worker_names_them(
    slots: int, places: int, limit: int | None
) -> None:
    capacity = Capacity(60, lambda: None)
    capacity.on_welcome(worker_pb2.Welcome(engine_request_limit=slots, request_queue_limit=places))
    assert capacity.request_limit == limit


def test_losing_the_session_ends_all_requests_and_refusals() -> None:
    async def scenario() -> None:
        capacity = Capacity(60, lambda: None)
        capacity.on_opened(3)
        capacity.on_refused(RefusedFor.CAPACITY, 1, 0)
        capacity.on_lost()
        assert (capacity.in_flight_count, capacity.is_full()) == (0, False)

    run_async(scenario())


def test_a_refusal_expires_by_itself_and_reports_it_once() -> None:
    async def scenario() -> tuple[list[str], bool]:
        reports: list[str] = []
        refusal = Refusal(1.0, lambda: reports.append("expired"))
        refusal.remember(1)
        pass_time(0.5)
        refusal.remember(1)
        pass_time(0.75)
        await settle()
        assert (reports, refusal.is_set) == ([], True), "it counts from the last refusal on"
        pass_time(1.0)
        await settle()
        return reports, refusal.is_set

    assert run_clocked(scenario()) == (["expired"], False)


def test_a_refusal_covers_the_smallest_amount_refused_and_anything_above_it() -> None:
    async def scenario() -> None:
        refusal = Refusal(60, lambda: None)
        held = []
        for refused_count in (4, 8, 2, None, 8):
            refusal.forget() if refused_count is None else refusal.remember(refused_count)
            held.append([count for count in (1, 2, 4, 8) if refusal.covers(count)])
        refusal.forget()
        assert held == [[4, 8], [4, 8], [2, 4, 8], [], [8]]

    run_async(scenario())


def test_a_forgotten_refusal_does_not_expire_later() -> None:
    async def scenario() -> None:
        reports: list[str] = []
        refusal, later = Refusal(0.01, lambda: reports.append("expired")), asyncio.Event()
        refusal.remember(1)
        refusal.forget()
        asyncio.get_running_loop().call_later(0.02, later.set)
        await later.wait()
        assert (refusal.is_set, reports) == (False, [])

    run_async(scenario())


# Tenants: what is full for one is not full for another that holds less, because the worker makes room for it

HEAVY, LIGHT = Tenant(name="heavy"), Tenant(name="light")


def capacity_of(**in_flight: int) -> Capacity:
    """A worker that takes six requests, with so many of each tenant in flight."""
    capacity = Capacity(60, lambda: None)
    capacity.on_welcome(worker_pb2.Welcome(engine_request_limit=4, request_queue_limit=2))
    for name, count in in_flight.items():
        capacity.on_opened(count, Tenant(name=name))
    return capacity


@pytest.mark.parametrize(("light", "heavy"), [(0, 6), (2, 4), (2, 6)])
def test_a_worker_with_as_many_requests_as_it_takes_is_full_for_the_tenant_that_has_most_of_them(
    light: int, heavy: int
) -> None:
    capacity = capacity_of(light=light, heavy=heavy)

    assert capacity.is_full(tenant=HEAVY)
    assert not capacity.is_full(tenant=LIGHT)


@pytest.mark.parametrize(("light", "heavy", "count"), [(3, 3, 1), (2, 3, 2), (0, 1, 6)])
def test_a_worker_is_full_for_a_tenant_that_would_then_have_as_many(light: int, heavy: int, count: int) -> None:
    assert capacity_of(light=light, heavy=heavy).is_full(count, tenant=LIGHT)


def test_requests_count_by_weight() -> None:
    capacity = capacity_of(light=3, heavy=3)

    assert not capacity.is_full(tenant=Tenant(name="light", weight=2.0))


def test_the_end_of_a_request_counts_for_its_tenant() -> None:
    capacity = capacity_of(light=2, heavy=4)
    for _ in range(2):
        capacity.on_closed(frees_room=False, tenant=HEAVY)
    capacity.on_opened(2, EVERYBODY)

    assert capacity.is_full(tenant=LIGHT)


@pytest.mark.parametrize("bound", [RefusedFor.CAPACITY, RefusedFor.TENANT_SHARE, RefusedFor.QUEUE_TOKENS])
def test_a_refusal_counts_for_its_tenant_alone(bound: RefusedFor) -> None:
    async def scenario() -> None:
        capacity = capacity_of()
        capacity.on_refused(bound, 1, 5, HEAVY)

        assert capacity.is_full(1, 5, HEAVY)
        assert not capacity.is_full(1, 5, LIGHT)
        capacity.on_lost()
        assert not capacity.is_full(1, 5, HEAVY)

    run_async(scenario())


def test_a_worker_is_closed_only_if_no_tenant_could_have_room() -> None:
    """With tenants only the worker knows, so routing has to look at it for each request."""
    everybodys = capacity_of()
    everybodys.on_opened(6)

    assert everybodys.is_closed
    assert not capacity_of(heavy=6).is_closed
    assert not capacity_of().is_closed


def test_tenants_without_requests_take_no_memory() -> None:
    async def scenario() -> None:
        capacity = capacity_of()
        for number in range(100):
            tenant = Tenant(name=str(number))
            capacity.on_opened(1, tenant)
            capacity.on_refused(RefusedFor.CAPACITY, 1, 0, tenant)
            capacity.on_closed(frees_room=False, tenant=tenant)
        capacity.on_load(worker_pb2.Load(ranks=[worker_pb2.RankLoad()]))

        assert (len(capacity._shares), len(capacity._refusals)) == (0, 0)

    run_async(scenario())
