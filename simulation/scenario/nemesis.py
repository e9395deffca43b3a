"""Brings the faults of a plan over the processes."""

import random
from functools import partial
from typing import Any

from services.access.keys_watch import AccessConfig
from services.core.flow.client_flow import ClientBounds
from services.http.server.config import HttpConfig
from services.worker.engines.mocker import Faults, MockerConfig
from services.worker.generations.store import DetachConfig
from services.worker.session import FrontendSessionConfig
from simulation.clients.crowd import fill
from simulation.plane import Plane
from simulation.runtime.world import Process, World
from simulation.scenario.history import RESTART_S, SETTLE_S, History, Struck
from simulation.scenario.invariants import Invariants
from simulation.scenario.lies import EXCUSED, LateEnds, Liars
from simulation.scenario.moments import Moments
from simulation.scenario.plan import Fault, Plan
from simulation.tenants import keys_file

SLOW_S = 0.05
"""How long bytes take on a slow way."""
ODD_CONTEXT_LENGTH = 65_536
PLANE = ("registry", "worker", "frontend")
HALF = 0.5
"""Every other registry that vanishes is stopped in order."""


def excused_by(plan: Plan) -> frozenset[str]:
    """What the product may log under this plan, though it does so only if something is wrong."""
    lies = EXCUSED if any(fault.kind == "lie" for fault in plan.faults) else frozenset()
    return lies | ({"worker cannot be used"} if plan.odd_worker else frozenset())


class Nemesis:
    """Starts the plane, disturbs it as planned, and starts again what has ended."""

    def __init__(self, world: World, plan: Plan, invariants: Invariants, history: History) -> None:
        self._world = world
        self._invariants = invariants
        self._plan = plan
        self._history = history
        self._plane = Plane(world)
        has_lies, chance = any(fault.kind == "lie" for fault in plan.faults), random.Random(f"{plan.seed}/lies")
        self._liars = Liars(world, chance) if has_lies else None
        if plan.splits_ends:
            LateEnds(chance)
        self._chance = random.Random(f"{plan.seed}/nemesis")
        self._moments = Moments(world, plan.faults, self._strike)

    def start(self) -> None:
        self._start("registry")
        for number in range(self._plan.workers):
            self._start(f"worker-{number}")
        for number in range(self._plan.frontends):
            self._start(f"frontend-{number}")
        for fault in self._plan.faults:
            if not fault.moment:
                self._world.at(SETTLE_S + fault.at_s, partial(self._strike, fault, fault.target, fault.other))

    @property
    def is_active(self) -> bool:
        """Whether a process of the plane is away, or a way between two of them is cut."""
        of_plane = (one for name, one in self._world.processes.items() if name.startswith(PLANE))
        away = (one.is_dead or one.is_frozen for one in of_plane)
        return bool(self._world.network.cut) or any(away)

    def _start(self, name: str) -> None:
        plan, kind, _, number = self._plan, *name.partition("-")
        if kind == "registry":
            process = self._plane.start_registry()
        elif kind == "worker":
            process = self._start_worker(int(number))
        else:
            keys: dict[str, Any] = {"access": AccessConfig(keys_file=keys_file())} if plan.has_keys else {}
            bounds = ClientBounds(buffer_bytes_max=plan.client_bytes_max)
            process = self._plane.start_frontend(
                int(number), drain_timeout_s=plan.drain_s, http=HttpConfig(client=bounds), **keys
            )
            process.on_turn = lambda: self._invariants.check_frontend(process)
        process.on_end = lambda: self._world.after(RESTART_S, lambda: self._start(name))

    def _start_worker(self, number: int) -> Process:
        plan = self._plan
        is_odd = plan.odd_worker and number == plan.workers - 1
        more: dict[str, Any] = {"context_length": ODD_CONTEXT_LENGTH} if is_odd else {}
        process = self._plane.start_worker(
            number,
            MockerConfig(
                itl_ms=plan.itl_ms, prefill_us_per_token=plan.prefill_us, faults=Faults(refuse=plan.refusals), **more
            ),
            engine_request_limit=plan.slots,
            request_queue_limit=plan.places,
            queue_timeout_s=plan.wait_s,
            drain_timeout_s=plan.drain_s,
            session=FrontendSessionConfig(
                heartbeat_s=plan.heartbeat_s,
                detach=DetachConfig(records_max=plan.records_max),
            ),
        )
        process.on_turn = lambda: self._invariants.check_worker(process)
        return process

    def _strike(self, fault: Fault, target: str, other: str) -> None:
        """Bring a fault over its target, if that is there."""
        process = self._world.processes.get(target)
        if process is None or process.is_dead or (fault.other and not other):
            return
        self._world.say("nemesis", f"{fault.kind} {target} {other} {fault.duration_s:g}")
        self._history.struck.append(
            Struck(at_s=self._world.now, kind=fault.kind, target=target, other=other, duration_s=fault.duration_s)
        )
        self._begin(fault, process, other)
        self._moments.on_fault()

    def _begin(self, fault: Fault, target: Process, other: str) -> None:
        world = self._world
        match fault.kind:
            case "kill":
                world.kill(target)
            case "drain":
                self._plane.drain(target)
            case "vanish_registry":
                self._vanish(target)
            case "freeze" | "freeze_registry":
                world.freeze(target)
                world.after(fault.duration_s, lambda: world.thaw(target))
            case "jump":
                target.skew_s += fault.duration_s
            case "partition" | "one_way" | "latency":
                self._disturb(fault, target.name, other)
            case "lie":
                assert self._liars is not None
                self._liars.lie(target.name)
            case "fill":
                fill(world, target.name, self._plan.slots + self._plan.places, fault.duration_s)

    def _vanish(self, target: Process) -> None:
        if self._chance.random() < HALF:
            self._plane.drain(target)
        else:
            self._world.kill(target)

    def _disturb(self, fault: Fault, target: str, other: str) -> None:
        """Disturb the way between two processes."""
        if fault.kind == "latency":
            self._slow_down((target, other), fault.duration_s)
            return
        self._cut(target, other, fault.duration_s)
        if fault.kind == "partition":
            self._cut(other, target, fault.duration_s)

    def _cut(self, source: str, target: str, duration_s: float) -> None:
        network = self._world.network
        network.partition(source, target)
        self._world.after(duration_s, lambda: network.heal(source, target))

    def _slow_down(self, way: tuple[str, str], duration_s: float) -> None:
        latency_s = self._world.network.latency_s
        latency_s[way] = latency_s[way[::-1]] = SLOW_S

        def calm() -> None:
            latency_s.pop(way, None)
            latency_s.pop(way[::-1], None)

        self._world.after(duration_s, calm)
