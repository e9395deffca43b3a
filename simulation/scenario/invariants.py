"""What always holds within the processes, whatever happens. That of the answers is in `checker.py`."""

from collections.abc import Iterable, Mapping

from services.worker.generations.generation import Generation, Owner
from simulation.runtime.world import Process, World
from simulation.scenario.plan import Plan
from simulation.scenario.watching import Watched, watch

STEPS_TO_STOP_MAX = 2
"""An engine runs on for at most so many steps after its client has left."""


class Invariants:
    """Adds what does not hold to the world's problems."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._epochs: dict[Generation, int] = {}
        watch(self._watched(), world.problems.append)

    def _watched(self) -> Iterable[Watched]:
        place = "services.worker.generations.generation:Generation.adopt"
        yield Watched("an answer was given to an older epoch", place, self._is_older)

    def _is_older(self, outcome: object, generation: Generation, _owner: Owner, epoch: int) -> bool:
        if isinstance(outcome, BaseException):
            return False
        newest = self._epochs.get(generation, generation.spec.epoch)
        self._epochs[generation] = max(newest, epoch)
        return epoch <= newest

    def check_worker(self, process: Process) -> None:
        """At every moment at most N requests run and at most Q wait."""
        if (worker := process.owner) is None:
            return
        execute, plan = worker._execute, self._plan
        if execute.running_count > plan.slots or execute.waiting_count > plan.places:
            process.on_turn = None
            counts = f"{execute.running_count} run and {execute.waiting_count} wait"
            self._world.problems.append(f"{process.name}: {counts}, though N is {plan.slots} and Q is {plan.places}")

    def on_client_left(self, request_id: str) -> None:
        """Its engine stops soon, if nothing is in the way."""
        plan = self._plan
        if not plan.faults:
            way_s = 2 * (plan.latency_s + self._world.network.jitter_s_max) + 20 * plan.turn_s_max
            soon_s = way_s + STEPS_TO_STOP_MAX * plan.itl_ms * 1e-3
            self._world.after(soon_s, lambda: self._check_stopped(request_id))

    def _check_stopped(self, request_id: str) -> None:
        for name, process in self._world.processes.items():
            if name.startswith("worker") and request_id in process.owner._gate._inside:
                self._world.problems.append(f"{name}: {request_id} runs on though its client has left")


def left_over(processes: Mapping[str, Process]) -> Iterable[str]:
    """Yield what has been left, once nothing runs any more."""
    for name, process in processes.items():
        owner = process.owner
        if process.is_dead or process.is_frozen or owner is None:
            continue
        if name.startswith("worker"):
            counts = (owner._execute.running_count, owner._execute.waiting_count, owner._gate.count)
            kept = (owner._service.generations.running_count, owner._service.generations.detached_count)
            if any(counts) or any(kept):
                yield f"{name}: (running, waiting, inside) are {counts}, (running, detached) answers {kept}"
        elif owner._gate.count or any(len(session._streams) for session in owner._pool.all_sessions()):
            yield f"{name}: {owner._gate.count} requests, and perhaps streams on sessions"
