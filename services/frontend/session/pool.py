"""The workers that this frontend can reach: one session to each instance, kept up for as long as it makes sense.

Discovery says where to look; only a session proves that a worker lives. So an instance that leaves the view keeps its
session until that ends by itself, and losing the registry for any time changes nothing.
"""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from services.core.common_layers import bug_failure
from services.core.errors import Failure, Reason
from services.core.model_card import ModelCard
from services.discovery.client import InstanceRecord
from services.frontend.model_catalog import ModelCatalog
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.worker_set import WorkerSet
from services.frontend.session.reader import ReadThrottle
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.writer import KEEPALIVE_S, CancelCounts
from services.http.server.cork import Cork
from services.runtime.backoff import Backoff
from services.runtime.log_throttle import LogThrottle
from services.runtime.tasks import root_cause

log = structlog.get_logger()

CHECK_REACH = "the worker's --advertise and --session-listen, and firewalls between"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """quarantine_s: how long a worker that failed is left alone where there is another."""

    quarantine_s: float = 5.0
    reconnect: Backoff = field(default_factory=Backoff)
    session: WorkerSessionConfig = field(default_factory=WorkerSessionConfig)


@dataclass(frozen=True, slots=True)
class _Loss:
    """How a session ended. was_found: requests could be sent on it. was_draining: the worker had said it leaves."""

    failure: Failure
    was_welcomed: bool
    was_found: bool
    was_draining: bool


class _WorkerOutage:
    """What the log has of one instance without a session: each loss, and now and then that it still can't be used."""

    def __init__(self) -> None:
        self._was_found = False
        self._reminder = LogThrottle()

    def add(self, record: InstanceRecord, loss: _Loss) -> None:
        """One more try has failed, or a session that could be used is lost."""
        if loss.was_found:
            self._was_found = True
            self._reminder.reset()
        if not self._reminder.should_log():
            return
        facts = {
            "instance": record.instance_id,
            "address": record.address,
            "session_address": record.sessions_at,
            "why": loss.failure.detail if loss.failure.reason is Reason.DRAINING else str(loss.failure),
        }
        if loss.was_draining:
            log.info("worker left", **facts)
        elif loss.was_found:
            log.warning("worker lost", **facts)
        elif loss.was_welcomed:
            log.error("worker cannot be used", **facts)
        elif self._was_found:
            log.warning("worker still away: trying again", **facts)
        else:
            log.warning("worker not reached: trying again", **facts, check=CHECK_REACH)


class Pool:
    """Keeps sessions. `run` owns all its tasks."""

    def __init__(self, catalog: ModelCatalog, config: PoolConfig, cork: Cork | None = None) -> None:
        """cork: of those who write on what workers say."""
        self._catalog = catalog
        self._config = config
        self._rng = random.Random()
        self._view: dict[str, InstanceRecord] = {}
        self._kept: set[str] = set()
        self._unkept: set[str] = set()  # Of the view, those that may have no task yet.
        self._has_unkept = asyncio.Event()
        self._welcomed: set[WorkerSession] = set()  # Those below, and those whose model is being learned.
        self._sessions: dict[str, WorkerSession] = {}
        self._worker_sets: dict[int, WorkerSet] = {}  # By the identity of their card.
        self._quarantined: dict[str, float] = {}  # instance id → until when, in loop time
        self._changed = asyncio.Event()
        self.cancels = CancelCounts()
        self._throttle = ReadThrottle()
        self._cork = cork

    # What routing sees

    def worker_set(self, card: ModelCard) -> WorkerSet:
        """The workers with this very card object, in any state."""
        if (worker_set := self._worker_sets.get(id(card))) is None:
            self._forget_empty_rosters()
            worker_set = self._worker_sets[id(card)] = WorkerSet(card)
        return worker_set

    def _forget_empty_rosters(self) -> None:
        """Of models that nobody serves and nobody waits for."""
        self._worker_sets = {
            key: one for key, one in self._worker_sets.items() if len(one) or not one.wait_queue.is_empty
        }

    def session(self, key: str) -> WorkerSession | None:
        """The session that `Call.worker` names, if it still lives."""
        return self._sessions.get(key)

    def candidate(self, key: str) -> Candidate | None:
        """The worker at the other end of that session, if the session still lives."""
        return None if (session := self._sessions.get(key)) is None else session.candidate

    def all_sessions(self) -> list[WorkerSession]:
        """Sessions to workers of any model, whatever their state."""
        return list(self._sessions.values())

    def served_cards(self) -> Sequence[ModelCard]:
        """Cards of the models that some worker takes requests for now, by name."""
        served = {
            one.card.model: one.card
            for one in self._worker_sets.values()
            if not all(worker.is_draining for worker in one)
        }
        return [served[name] for name in sorted(served)]

    def _is_served(self, model: str) -> bool:
        """Whether there is a worker of that name, whatever its state."""
        return any(len(one) for one in self._worker_sets.values() if one.card.model == model)

    def offer(self, session: WorkerSession) -> None:
        """Requests can be sent on it from now on."""
        self._sessions[session.key] = session
        self.worker_set(session.card).add(session.candidate)
        self._notify()

    def withdraw(self, session: WorkerSession) -> bool:
        """It is over. Whether it was offered."""
        if self._sessions.pop(session.key, None) is None:
            return False
        self.worker_set(session.card).remove(session.candidate)
        self._notify()
        return True

    def on_worker_change(self, worker: Candidate) -> None:
        """A worker may have room again, or leaves."""
        if (session := self._sessions.get(worker.key)) is not None:
            self.worker_set(session.card).on_change(worker)
        self._notify()

    @property
    def has_all(self) -> bool:
        """Whether discovery has named workers, and each of them can be sent requests."""
        if not 0 < len(self._view) <= len(self._sessions):  # Before all are looked at, for each that is found.
            return False
        return self._view.keys() <= {one.record.instance_id for one in self._sessions.values()}

    @property
    def unreached_count(self) -> int:
        """How many workers discovery names that can't be sent requests."""
        return len(self._view.keys() - {one.record.instance_id for one in self._sessions.values()})

    def quarantine(self, worker: Candidate) -> None:
        """Leave the worker alone for a while."""
        self._quarantine_instance(worker.instance_id)
        worker.quarantined_until = self._quarantined[worker.instance_id]

    def _quarantine_instance(self, instance_id: str) -> None:
        """Outlives the session: a worker that breaks one session after another is not new each time."""
        self._quarantined[instance_id] = asyncio.get_running_loop().time() + self._config.quarantine_s

    @property
    def next_change(self) -> asyncio.Event:
        """Set when a session comes or goes, has room again, or is leaving. Take it before you look.

        It wakes all who wait for it: who waits for room stands in the roster's line.
        """
        return self._changed

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # What discovery sees

    def on_change(self, put: Mapping[str, InstanceRecord], gone: Collection[str]) -> None:
        """Instances are new or different, and others gone from discovery's view."""
        before = [self._view.pop(instance_id, None) for instance_id in (*put, *gone)]
        self._view.update(put)
        self._catalog.note_registered(put.values(), [record for record in before if record is not None])
        self._unkept.update(put)
        self._has_unkept.set()

    async def run(self) -> None:
        """Keep sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            while True:
                await self._has_unkept.wait()
                self._has_unkept.clear()
                unkept, self._unkept = self._unkept, set()
                for instance_id in unkept - self._kept:
                    self._kept.add(instance_id)
                    group.create_task(self._keep(instance_id))

    async def _keep(self, instance_id: str) -> None:
        """One session after another to one instance, until it is gone from the view and the session is lost."""
        tries, outage = 0, _WorkerOutage()
        try:
            while (record := self._view.get(instance_id)) is not None:
                lost = await self._hold(record)
                if lost.was_found:
                    self._quarantine_instance(instance_id)
                outage.add(record, lost)
                tries = 0 if lost.was_found else tries + 1
                await asyncio.sleep(self._config.reconnect.delay_s(tries, self._rng))
        finally:
            self._kept.discard(instance_id)
            self._quarantined.pop(instance_id, None)
            if instance_id in self._view:  # Again, by now.
                self._unkept.add(instance_id)
                self._has_unkept.set()

    async def _hold(self, record: InstanceRecord) -> _Loss:
        """One session, from its opening to its loss."""
        session = WorkerSession(
            record,
            self._config.session,
            on_change=self.on_worker_change,
            cancels=self.cancels,
            throttle=self._throttle,
            cork=self._cork,
        )
        welcome = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._admit(session, welcome))
                await session.run(welcome)
        except ExceptionGroup as group:
            if not isinstance(failure := root_cause(group), Failure):
                raise
            return _Loss(
                failure,
                was_welcomed=welcome.is_set(),
                was_found=session.key in self._sessions,
                was_draining=session.candidate.is_draining,
            )
        finally:
            self._welcomed.discard(session)
            self.withdraw(session)
        raise AssertionError("a session ends with a failure")

    async def _admit(self, session: WorkerSession, welcome: asyncio.Event) -> None:
        """Offer the worker to requests once its model is known."""
        await welcome.wait()
        self._welcomed.add(session)
        try:
            card = await self._catalog.learn(
                session.card, session.record.address, lambda: not self._is_served(session.card.model)
            )
        except Failure as failure:
            session.lose(failure)
            return
        except Exception as error:
            session.lose(bug_failure(error, f"(any) to {session.name}"))
            return
        if not session.is_lost:
            session.set_card(card)
            session.candidate.quarantined_until = self._quarantined.get(session.record.instance_id, 0.0)
            log.info("worker found", instance=session.record.instance_id, address=session.record.address)
            self.offer(session)

    async def _sweep(self) -> None:
        """Look for silent workers when one may be, and be heard by all: not to the moment, or we would look for each.

        If we were late ourselves, their silence proves nothing: we hear them every quarter of `stall_s`, and so must
        notice that we stood still for half of it. A worker that was idle at one look may be lost soon after the next.
        """
        clock, stall_s = asyncio.get_running_loop().time, self._config.session.stall_s
        pause_s_max = min(stall_s / 4, KEEPALIVE_S)
        last = clock()
        while True:
            now = clock()
            is_late, due, last = now - last > stall_s / 2, now + pause_s_max, now
            for session in list(self._welcomed):
                if is_late:
                    session.forgive(now)
                due = min(due, session.check(now))
            await asyncio.sleep(due - now)
