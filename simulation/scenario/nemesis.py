"""Brings the faults of a plan over the processes."""

from collections.abc import Callable

from services.worker.engines.mocker import MockerConfig
from services.worker.generations.store import DetachConfig
from services.worker.session import FrontendSessionConfig
from simulation.plane import Plane
from simulation.runtime.world import Process, World
from simulation.scenario.invariants import Invariants
from simulation.scenario.plan import Fault, Plan

RESTART_S = 0.3
"""How soon a supervisor starts a process again that has ended."""
SETTLE_S = 1.0
"""How long the plane has to come up before the first request."""


class Nemesis:
    """Starts the plane, disturbs it as planned, and starts again what has ended."""

    def __init__(self, world: World, plan: Plan, invariants: Invariants) -> None:
        self._world = world
        self._invariants = invariants
        self._plan = plan
        self._plane = Plane(world)
        self.workers: dict[str, Process] = {}

    def start(self) -> None:
        self._start("registry")
        for number in range(self._plan.workers):
            self._start(f"worker-{number}")
        for number in range(self._plan.frontends):
            self._start(f"frontend-{number}")
        for fault in self._plan.faults:
            self._world.at(SETTLE_S + fault.at_s, self._act(fault))

    def _start(self, name: str) -> None:
        plan, kind, _, number = self._plan, *name.partition("-")
        if kind == "registry":
            process = self._plane.start_registry()
        elif kind == "worker":
            process = self._plane.start_worker(
                int(number),
                MockerConfig(itl_ms=plan.itl_ms),
                engine_request_limit=plan.slots,
                request_queue_limit=plan.places,
                drain_timeout_s=plan.drain_s,
                session=FrontendSessionConfig(heartbeat_s=plan.heartbeat_s, detach=DetachConfig()),
            )
        else:
            process = self._plane.start_frontend(int(number), drain_timeout_s=plan.drain_s)
        if kind == "worker":
            process.on_turn = lambda: self._invariants.check_worker(process)
        process.on_end = lambda: self._world.after(RESTART_S, lambda: self._start(name))

    def _act(self, fault: Fault) -> Callable[[], None]:
        def act() -> None:
            self._world.say("nemesis", str(fault))
            self._begin(fault)

        return act

    def _begin(self, fault: Fault) -> None:
        world, network = self._world, self._world.network
        target = world.processes[fault.target]
        match fault.kind:
            case "kill" | "vanish_registry":
                world.kill(target)
            case "freeze" | "freeze_registry":
                world.freeze(target)
                world.after(fault.duration_s, lambda: world.thaw(target))
            case "jump":
                target.skew_s += fault.duration_s
            case "drain":
                self._plane.drain(target)
            case "partition" | "one_way":
                ways = [(fault.target, fault.other)]
                if fault.kind == "partition":
                    ways.append((fault.other, fault.target))
                for way in ways:
                    network.partition(*way)
                    world.after(fault.duration_s, lambda way=way: network.heal(*way))  # type: ignore[misc]
            case "latency":
                way = (fault.target, fault.other)
                network.latency_s[way] = network.latency_s[way[::-1]] = 0.05
                world.after(fault.duration_s, lambda: self._calm(way))

    def _calm(self, way: tuple[str, str]) -> None:
        for one in (way, way[::-1]):
            self._world.network.latency_s.pop(one, None)
