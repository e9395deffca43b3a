"""Runs one plan, and checks what came of it."""

import asyncio
import random
from dataclasses import dataclass

from simulation.clients.grpc_client import GrpcClient
from simulation.clients.http_client import HttpClient
from simulation.plane import install
from simulation.runtime.world import World
from simulation.scenario.checker import Checker
from simulation.scenario.history import SETTLE_S, History
from simulation.scenario.invariants import Invariants, left_over, miscounted
from simulation.scenario.nemesis import Nemesis, excused_by
from simulation.scenario.plan import Plan
from simulation.scenario.situations import SITUATIONS
from simulation.scenario.watching import end_watching, watch
from simulation.tenants import keys_file

END_S = 120.0
"""Virtual time after which every request must have ended."""
REST_S_MAX = 20.0
"""Virtual time within which the plane comes to rest afterwards."""
REST_LOOK_S = 1.0


@dataclass(frozen=True)
class Report:
    """What came of a run. `problems`: what is wrong; empty: the run is good."""

    problems: tuple[str, ...]
    trace: tuple[str, ...]
    fingerprint: int
    turns: int
    reached: frozenset[str]


def run_plan(plan: Plan) -> Report:
    """Run a plan to its end. Returns when nothing of it runs any more."""
    try:
        return _run(plan)
    finally:
        end_watching()


def _run(plan: Plan) -> Report:
    if plan.has_keys:
        keys_file()  # Before the world's dice are in use: only the first run of a process makes it.
    world = World(str(plan.seed), turn_s_max=plan.turn_s_max)
    world.network.latency_default_s = plan.latency_s
    world.network.buffer_bytes = plan.buffer_bytes
    install(world, excused_by(plan))
    reached: set[str] = set()
    watch(SITUATIONS, reached.add)
    history = History(plan)
    invariants = Invariants(world, plan, history)
    nemesis = Nemesis(world, plan, invariants, history)
    nemesis.start()
    chance = random.Random(f"{plan.seed}/clients")
    clients = [
        (GrpcClient if request.wire == "grpc" else HttpClient)(
            world, request, plan.frontends, chance, invariants.on_client_left
        )
        for request in plan.requests
    ]
    world.run(SETTLE_S)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run())

    running = world.spawn("clients", main)
    world.run(SETTLE_S + END_S, stop=lambda: running.is_dead)
    problems = list(world.problems)
    if not running.is_dead:
        problems.append("some requests did not end")
    world.run(world.now + plan.idle_s)
    _come_to_rest(world, nemesis, plan)
    world.collect()
    problems += world.problems[len(problems) :]
    checker = Checker(plan, history)
    for request, client in zip(plan.requests, clients, strict=True):
        problems += checker.check(request, client.answer)
    problems += left_over(world.processes, plan)
    problems += miscounted(world.processes, [client.answer for client in clients], history)
    return Report(tuple(problems), tuple(world.trace), world.fingerprint, world.turns, frozenset(reached))


def _come_to_rest(world: World, nemesis: Nemesis, plan: Plan) -> None:
    """Run until no fault is in effect and nothing is left over. If that never comes, what is left is a problem."""
    latest = world.now + REST_S_MAX
    while world.now < latest and (nemesis.is_active or any(left_over(world.processes, plan))):
        world.run(world.now + REST_LOOK_S)
