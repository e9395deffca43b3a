"""Plans drawn from seeds: together they have all that the simulation knows, and each of them can be run."""

from typing import get_args

from simulation.scenario.drawing import draw_plan
from simulation.scenario.moments import FAULT_MOMENT, MOMENTS
from simulation.scenario.plan import BYTES_ENOUGH, ELSEWHERE, FAULT_KINDS, HERE, THERE, WIRES, Plan, Reader

PLANS = [draw_plan(seed) for seed in range(1000)]


def processes_of(plan: Plan) -> set[str]:
    workers = {f"worker-{number}" for number in range(plan.workers)}
    return workers | {f"frontend-{number}" for number in range(plan.frontends)} | {"registry"}


def test_same_seed_draws_the_same_plan() -> None:
    assert [draw_plan(seed) for seed in range(20)] == PLANS[:20]


def test_every_kind_of_fault_moment_reader_and_wire_is_drawn() -> None:
    faults = [fault for plan in PLANS for fault in plan.faults]
    requests = [request for plan in PLANS for request in plan.requests]

    assert {fault.kind for fault in faults} == set(FAULT_KINDS)
    assert {fault.moment for fault in faults} == {*MOMENTS, FAULT_MOMENT, ""}
    assert {request.reader for request in requests} == set(get_args(Reader))
    assert {request.wire for request in requests} == set(WIRES)


def test_faults_name_processes_of_their_plan_or_those_of_their_moment() -> None:
    for plan in PLANS:
        for fault in plan.faults:
            known = processes_of(plan)
            if fault.moment not in ("", FAULT_MOMENT):
                known |= {HERE, THERE, ELSEWHERE}
            assert {fault.target, fault.other or fault.target} <= known, fault


def test_some_fault_of_each_plan_waits_for_no_other() -> None:
    assert all(any(fault.moment != FAULT_MOMENT for fault in plan.faults) for plan in PLANS if plan.faults)


def test_no_request_asks_for_more_answers_than_a_worker_has_room_for() -> None:
    for plan in PLANS:
        assert all(request.n <= plan.slots + plan.places for request in plan.requests)


def test_plan_without_a_request_or_a_fault_has_all_others() -> None:
    plan = next(plan for plan in PLANS if len(plan.requests) > 1 and len(plan.faults) > 1)

    assert plan.without(request=0).requests == plan.requests[1:]
    assert plan.without(fault=1).faults == (plan.faults[0], *plan.faults[2:])


def test_only_slow_clients_have_little_room() -> None:
    """Seed 1708: a client that was not slow was cut off."""
    narrow = [plan for plan in (*PLANS, draw_plan(1708)) if plan.client_bytes_max < BYTES_ENOUGH]

    assert narrow
    assert all(request.reader == "slow" for plan in narrow for request in plan.requests)
