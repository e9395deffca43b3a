"""What always holds within the processes, whatever happens. That of the answers is in `checker.py`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from services.core.errors import Failure, Reason
from services.worker.generations.generation import Generation, Owner
from services.worker.outbox import TOKEN_BYTES
from simulation.clients.answer import Answer
from simulation.runtime.world import Process, World
from simulation.scenario.history import History
from simulation.scenario.plan import Plan
from simulation.scenario.watching import Watched, watch

STEPS_TO_STOP_MAX = 2
"""An engine runs on for at most so many steps after its client has left, or has moved away from it."""
TURNS_TO_STOP_MAX = 60
"""Turns of event loops until a worker has heard of it: those of all processes, since each takes virtual time."""
JOIN_S_MAX, LATE_JOIN_S_MAX = 0.1, 0.5
"""How long a stream of a choice may wait for the choice: the choices of a request start together. The second holds
where a choice may hear later than the others that it was refused elsewhere."""
BROKEN = frozenset({Reason.DISCONNECTED, Reason.STALLED, Reason.STREAM_INCOMPLETE, Reason.PROTOCOL_VIOLATION})
"""How a session ends that is lost, rather than closed or never opened."""


class Invariants:
    """Adds what does not hold to the world's problems."""

    def __init__(self, world: World, plan: Plan, history: History) -> None:
        self._world = world
        self._plan = plan
        self._history = history
        self._epochs: dict[Generation, int] = {}
        self._reserved_since: dict[str, float] = {}
        self._moves_from: dict[Any, Any] = {}  # The session of a migration while another attempt delivers.
        self._full_since: dict[Any, int] = {}  # By buffer of a client: since which turn it is beyond its bound.
        self._woken_for: dict[Any, int] = {}  # By queue: the last that waited when there was room again.
        watch(self._watched(), world.problems.append)

    def _watched(self) -> Iterable[Watched]:
        adopt = "services.worker.generations.generation:Generation.adopt"
        yield Watched("an answer was given to an older epoch", adopt, self._is_older)
        lose = "services.frontend.session.session:WorkerSession.lose"
        yield Watched("a session was lost without a cause", lose, self._is_lost_without_cause, before=True)
        take_over = "services.frontend.migration.migration:Migration._try_take_over"
        yield Watched("", take_over, self._before_take_over, before=True)
        yield Watched("", take_over, self._on_take_over)
        add = "services.core.flow.delta_buffer:DeltaBuffer.add"
        yield Watched("the buffer of a client grows beyond its bound", add, self._is_beyond_bound)
        yield Watched("", "services.frontend.routing.wait_queue:WaitQueue.wake_first", self._on_room, before=True)

    def _is_older(self, outcome: object, generation: Generation, _owner: Owner, epoch: int) -> bool:
        if isinstance(outcome, BaseException):
            return False
        newest = self._epochs.get(generation, generation.spec.epoch)
        self._epochs[generation] = max(newest, epoch)
        return epoch <= newest

    def _is_beyond_bound(self, _: object, buffer: Any, __: object) -> bool:
        """The request of a client that leaves more unread than it may ends soon."""
        here = self._world.current
        if here is None or not here.name.startswith("frontend") or buffer.size <= self._plan.client_bytes_max:
            return False
        return self._world.turns > self._full_since.setdefault(buffer, self._world.turns) + TURNS_TO_STOP_MAX

    def _is_lost_without_cause(self, _: object, session: Any, failure: Failure) -> bool:
        """What stands still, or is slow, is not lost."""
        frontend, now = self._world.current, self._world.now
        if session.is_lost or session._card is None or failure.reason not in BROKEN or frontend is None:
            return False
        worker = self._worker_of(session)
        if worker is None or self._history.may_break(frontend.name, worker.name, now):
            return False
        self._world.say(frontend.name, f"PROBLEM lost {worker.name}: {failure}")
        return True

    def _worker_of(self, session: Any) -> Process | None:
        """The process of a session; None if it is not there any more."""
        for name, process in self._world.processes.items():
            owner = process.owner
            if name.startswith("worker") and owner and owner._instance_id == session.record.instance_id:
                return process
        return None

    # At every turn

    def check_worker(self, process: Process) -> None:
        """At every moment at most N requests run and at most Q wait, and the engine has none but those that run."""
        if (worker := process.owner) is None:
            return
        execute, plan = worker._execute, self._plan
        if execute.running_count > plan.slots or execute.waiting_count > plan.places:
            counts = f"{execute.running_count} run and {execute.waiting_count} wait"
            self._stop(process, f"{counts}, though N is {plan.slots} and Q is {plan.places}")
        if len(worker._engine._rank_of) > execute.running_count:
            self._stop(process, f"the engine has {len(worker._engine._rank_of)}, {execute.running_count} run")
        if worker._gate.count != len(execute._active):
            self._stop(process, f"{worker._gate.count} requests are inside, {len(execute._active)} run or wait")
        self._check_records(process, worker._service.generations)
        for session in worker._service._sessions:
            self._check_outbox(process, session)

    def _check_outbox(self, process: Process, session: Any) -> None:
        """What a frontend leaves unread is within its bound, and is counted rightly."""
        outbox = session._outbox
        if outbox.token_count > session._config.outbox_tokens_max and not session._is_over.is_set():
            self._stop(process, f"{outbox.token_count} tokens wait for a frontend")
        is_empty = not (outbox.token_count or outbox._entries)
        if not is_empty and not self._plan.splits_ends and (size := _size_of(outbox)) != outbox.token_count:
            self._stop(process, f"{size} tokens wait for a frontend, and are counted as {outbox.token_count}")

    def _check_records(self, process: Process, store: Any) -> None:
        """What waits without an owner is within its bounds, and is counted rightly."""
        detached = store._detached
        if len(detached) > self._plan.records_max:
            self._stop(process, f"{len(detached)} records wait, of at most {self._plan.records_max}")
        if (size := sum(one.size for one in detached)) != store.detached_bytes:
            self._stop(process, f"records that wait have {size} bytes, not {store.detached_bytes}")

    def check_frontend(self, process: Process) -> None:
        """A worker counts with its open streams, and a stream that is reserved for a choice is joined soon."""
        if (frontend := process.owner) is None:
            return
        for worker_set in frontend._pool._worker_sets.values():
            if not worker_set.wait_queue.is_empty:
                self._check_queue(process, worker_set)
        for session in frontend._pool._sessions.values():
            if session.candidate.in_flight_count != len(session._streams) and not session.is_lost:
                counts = f"{session.candidate.in_flight_count}, though {len(session._streams)} are open"
                self._stop(process, f"the streams on {session.name} count as {counts}")
            if not session._streams._reserved:
                self._reserved_since.pop(session.key, None)
            elif self._world.now > self._reserved_since.setdefault(session.key, self._world.now) + self._join_s_max:
                self._stop(process, f"a stream on {session.name} is reserved, and its choice does not come")

    def _on_room(self, _: object, queue: Any) -> bool:
        self._woken_for[queue] = queue._waiters[-1].number if queue._waiters else 0
        return False

    def _check_queue(self, process: Process, worker_set: Any) -> None:
        """Where a worker has room again, all that waited for it look, one after the other."""
        queue = worker_set.wait_queue
        waiting = [one.number for one in queue._waiters if one.number <= self._woken_for.get(queue, 0)]
        if not waiting or queue._woken_to >= waiting[-1] or any(one.is_woken for one in queue._waiters):
            return
        if not all(one.is_closed for one in worker_set.open):
            self._stop(process, f"{len(waiting)} requests wait, and none of them looks for the room that there is")

    @property
    def _join_s_max(self) -> float:
        return LATE_JOIN_S_MAX if self._plan.splits_ends else JOIN_S_MAX

    def _stop(self, process: Process, what: str) -> None:
        """Report it once."""
        process.on_turn = None
        self._world.problems.append(f"{process.name}: {what}")

    # Some time after an event

    @property
    def _soon_s(self) -> float:
        """How long a worker needs to hear of it, and to stop."""
        plan = self._plan
        way_s = 3 * (plan.latency_s + self._world.network.jitter_s_max) + TURNS_TO_STOP_MAX * plan.turn_s_max
        return way_s + STEPS_TO_STOP_MAX * plan.itl_ms * 1e-3

    def on_client_left(self, request_id: str) -> None:
        """Its engine stops soon, if nothing is in the way."""
        began_s = self._world.now

        def check() -> None:
            for name, process in self._world.processes.items():
                if not name.startswith("worker") or process.is_dead or process.owner is None:
                    continue
                is_calm = self._history.is_calm(began_s, self._world.now, name)
                if is_calm and any(request_id == name for _, name in process.owner._gate._inside):
                    self._world.problems.append(f"{name}: {request_id} runs on though its client has left")

        self._world.after(self._soon_s, check)

    def _before_take_over(self, _: object, migration: Any, *__: object) -> bool:
        self._moves_from[migration] = migration._current.session
        return False

    def _on_take_over(self, outcome: object, migration: Any, *_: object) -> bool:
        """The worker from which a stream moves stops soon."""
        session, began_s = self._moves_from.pop(migration), self._world.now
        worker = None if session is None else self._worker_of(session)
        request_id, choice = migration._call.request_id, migration._request.choice

        def check() -> None:
            if worker is None or worker.is_dead:
                return
            if not self._history.is_calm(began_s, self._world.now, worker.name):
                return
            for active in worker.owner._execute._active.values():
                if (active.call.request_id, active.request.choice) == (request_id, choice):
                    self._world.problems.append(f"{worker.name}: {request_id} runs on though it has moved")

        if outcome is True:
            self._world.after(self._soon_s, check)
        return False


def _size_of(outbox: Any) -> int:
    """What waits in an outbox, in tokens."""
    size: int = len(outbox._message.begun)
    size += sum(len(token_ids) for _, token_ids in outbox._entries.values())
    size += sum(1 + len(one.top) for some in outbox._logprobs.values() for one in some)
    size += sum(-(-end.ByteSize() // TOKEN_BYTES) for end in outbox._message.ends)
    return size


def left_over(processes: Mapping[str, Process], plan: Plan) -> Iterable[str]:
    """Yield what has been left, once nothing runs any more."""
    for name, process in processes.items():
        owner = process.owner
        if process.is_dead or process.is_frozen or owner is None:
            continue
        left = _left_in_worker(owner) if name.startswith("worker") else _left_in_frontend(owner)
        if counts := {what: count for what, count in left.items() if count}:
            yield f"{name}: at rest there are {counts}"
    if not plan.odd_worker:
        yield from _unknown(processes)


def _left_in_worker(worker: Any) -> dict[str, int]:
    service, execute = worker._service, worker._execute
    return {
        "running": execute.running_count,
        "waiting": execute.waiting_count,
        "inside": worker._gate.count,
        "in the engine": len(worker._engine._rank_of),
        "running generations": service.generations.running_count,
        "records": len(service.generations._by_id),
        "bytes of records": service.generations.detached_bytes,
        "streams": sum(len(session._streams) + len(session._owned) for session in service._sessions),
        "questions": sum(session._owned.question_count for session in service._sessions),
    }


def _left_in_frontend(frontend: Any) -> dict[str, int]:
    sessions = frontend._pool.all_sessions()
    tables = [session._streams for session in sessions]
    worker_sets = frontend._pool._worker_sets.values()
    return {
        "inside": frontend._gate.count,
        "streams": sum(len(table) for table in tables),
        "reserved": sum(len(table._reserved) for table in tables),
        "adoptions": sum(len(table._adoptions) for table in tables),
        "counted on workers": sum(session.candidate.in_flight_count for session in sessions),
        "waiting for room": sum(not one.wait_queue.is_empty for one in worker_sets),
        "in flight": int(sum(sample.value for sample in _samples(frontend, "inflight_requests"))),
    }


def _samples(frontend: Any, name: str) -> list[Any]:
    families = frontend._metrics.registry.collect()
    return [sample for family in families if family.name.endswith(name) for sample in family.samples]


def _unknown(processes: Mapping[str, Process]) -> Iterable[str]:
    """Every frontend has one session to each worker that lives, and to nobody else."""
    workers = {
        process.owner._instance_id
        for name, process in processes.items()
        if name.startswith("worker") and not process.is_dead
    }
    for name, process in processes.items():
        if name.startswith("frontend") and not process.is_dead and process.owner is not None:
            sessions = [session.record.instance_id for session in process.owner._pool.all_sessions()]
            if sorted(sessions) != sorted(workers):
                yield f"{name}: has sessions with {sorted(sessions)}, though the workers are {sorted(workers)}"
            if sorted(view := process.owner._pool._view) != sorted(workers):
                yield f"{name}: knows of {sorted(view)}, though the workers are {sorted(workers)}"


def miscounted(processes: Mapping[str, Process], answers: Sequence[Answer], history: History) -> Iterable[str]:
    """Every request is counted once, with the outcome that its client saw. Yield where that is not so.

    A client that has left, or was cut off, may not have seen how its request ended.
    """
    visits = [visit for answer in answers for visit in answer.visits]
    for name, process in processes.items():
        mine = [visit for visit in visits if visit.frontend == name]
        if not name.startswith("frontend") or process.is_dead or history.has_ended(name):
            continue  # One that has been started again has forgotten what it counted.
        seen = Counter(visit.ending for visit in mine if visit.ending)
        unseen = sum(not visit.ending for visit in mine)
        counted = Counter[str]()
        for sample in _samples(process.owner, "requests"):
            if sample.name.endswith("_requests_total"):
                is_success = sample.labels["status"] == "success"
                counted["complete" if is_success else sample.labels["error_type"]] += int(sample.value)
        for ending in sorted({*seen, *counted}):
            if not seen[ending] <= counted[ending] <= seen[ending] + unseen:
                yield f"{name}: counted {counted[ending]} with {ending}, {seen[ending]} (and {unseen} unseen) came so"
