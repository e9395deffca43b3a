"""The sessions of this frontend: one to each worker instance, opened again whenever it is lost.

Discovery says which instances exist; only a session proves that a worker lives. So an instance that leaves the view of
discovery keeps its session until that ends by itself, and an unreachable registry changes nothing.
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
from services.frontend.session.leftovers import Leftovers
from services.frontend.session.reader import ReadThrottle
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.writer import KEEPALIVE_S, CancelCounts
from services.http.server.cork import Cork
from services.runtime.backoff import Backoff
from services.runtime.log_throttle import LogThrottle
from services.runtime.tasks import root_cause
from services.tls.peers import Peers

log = structlog.get_logger()

FRONTEND_COUNT_S = 0.1
"""How long the number of frontends that workers tell is believed: to ask a thousand workers takes a while."""
CHECK_REACH = "the worker's --advertise and --session-listen, and firewalls between"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """`quarantine_s`: how long other workers are preferred to one that failed."""

    quarantine_s: float = 5.0
    reconnect: Backoff = field(default_factory=Backoff)
    session: WorkerSessionConfig = field(default_factory=WorkerSessionConfig)


@dataclass(frozen=True, slots=True)
class _Loss:
    """How a session ended.

    `was_welcomed`: the worker had answered. `was_refused`: this frontend cannot use it. `was_found`: requests could be
    sent on the session. `was_draining`: the worker had announced that it leaves.
    """

    failure: Failure
    was_welcomed: bool
    was_refused: bool
    was_found: bool
    was_draining: bool


class _WorkerOutage:
    """Logs why one instance has no session: each loss, and from time to time a failed attempt to open one."""

    def __init__(self) -> None:
        self._was_found = False
        self._absence = LogThrottle()
        self._refusal = LogThrottle()  # Its own: that a worker was away does not say that it cannot be used.

    def log_loss(self, record: InstanceRecord, loss: _Loss) -> None:
        """A session is lost, or could not be opened."""
        if loss.was_found:
            self._was_found = True
            self._absence.reset()
            self._refusal.reset()
        if not (self._refusal if loss.was_refused else self._absence).should_log():
            return
        facts = {
            "instance": record.instance_id,
            "address": record.address,
            "session_address": record.sessions_at,
            "why": loss.failure.detail if loss.failure.reason is Reason.DRAINING else str(loss.failure),
        }
        if loss.was_refused:
            log.error("worker cannot be used", **facts)
        elif loss.was_draining:
            log.info("worker left", **facts)
        elif loss.was_welcomed:
            log.warning("worker lost", **facts)
        elif self._was_found:
            log.warning("worker still away: trying again", **facts)
        else:
            log.warning("worker not reached: trying again", **facts, check=CHECK_REACH)


class Pool:
    """Opens and keeps the sessions. `run` owns all its tasks."""

    def __init__(
        self, catalog: ModelCatalog, config: PoolConfig, cork: Cork | None = None, peers: Peers | None = None
    ) -> None:
        """`cork`: corks the connections to clients while one read of a worker's messages is handled.

        `peers`: how to reach workers over TLS; None: without.
        """
        self._peers = peers
        self._catalog = catalog
        self._config = config
        self._rng = random.Random()
        self._view: dict[str, InstanceRecord] = {}
        self._kept: set[str] = set()  # Ids of instances with a task that keeps their session.
        self._unkept: dict[str, None] = {}  # Ids of instances of the view that may have no such task, in order.
        self._has_unkept = asyncio.Event()
        self._welcomed: dict[WorkerSession, None] = {}  # Including sessions whose model is still being learned.
        self._sessions: dict[str, WorkerSession] = {}  # By key: sessions on which requests can be sent.
        self._worker_sets: dict[int, WorkerSet] = {}  # By the identity of their card.
        self._quarantined: dict[str, float] = {}  # instance id → until when, in event-loop time
        self._changed = asyncio.Event()
        self.cancels = CancelCounts()
        self._leftovers = Leftovers()
        self._frontend_count = 1
        self._count_again_at = 0.0
        self._throttle = ReadThrottle()
        self._cork = cork

    # For routing

    def worker_set(self, card: ModelCard) -> WorkerSet:
        """The workers with this very card object, in any state."""
        if (worker_set := self._worker_sets.get(id(card))) is None:
            self._drop_unused_worker_sets()
            worker_set = self._worker_sets[id(card)] = WorkerSet(card)
        return worker_set

    def _drop_unused_worker_sets(self) -> None:
        """Drop worker sets that have neither workers nor waiting requests."""
        self._worker_sets = {
            key: one for key, one in self._worker_sets.items() if len(one) or not one.wait_queue.is_empty
        }

    def session(self, key: str) -> WorkerSession | None:
        """The session with this key; None if it is lost, or requests cannot be sent on it yet."""
        return self._sessions.get(key)

    def candidate(self, key: str) -> Candidate | None:
        """The worker of the session with this key; None as for `session`."""
        return None if (session := self._sessions.get(key)) is None else session.candidate

    def all_sessions(self) -> list[WorkerSession]:
        """The sessions with workers of all models, in any state."""
        return list(self._sessions.values())

    def frontend_count(self) -> int:
        """What `count_frontends` returned a moment ago."""
        now = asyncio.get_running_loop().time()
        if now >= self._count_again_at:
            self._count_again_at = now + FRONTEND_COUNT_S
            self._frontend_count = self.count_frontends()
        return self._frontend_count

    def count_frontends(self) -> int:
        """How many frontend processes are alive, as workers tell: this one, and those that have sessions with them."""
        return max([1, *(one.candidate.load.last.frontends for one in self._sessions.values())])

    def served_cards(self) -> Sequence[ModelCard]:
        """The cards of the models that have a worker which is not leaving, sorted by name."""
        served = {
            one.card.model: one.card
            for one in self._worker_sets.values()
            if not all(worker.is_draining for worker in one)
        }
        return [served[name] for name in sorted(served)]

    def _is_served(self, model: str) -> bool:
        """Whether the model has a worker, in any state."""
        return any(len(one) for one in self._worker_sets.values() if one.card.model == model)

    def offer(self, session: WorkerSession) -> None:
        """Send requests on the session from now on."""
        self._leftovers.on_session(session.record.instance_id, session.generations)
        self._sessions[session.key] = session
        self.worker_set(session.card).add(session.candidate)
        self._notify()

    def withdraw(self, session: WorkerSession) -> None:
        """Send no more requests on the session, which is over. Ignored if it was never offered."""
        if self._sessions.pop(session.key, None) is not None:
            self._leftovers.on_lost(session.record.instance_id)
            self.worker_set(session.card).remove(session.candidate)
            self._notify()

    def on_worker_change(self, worker: Candidate) -> None:
        """A worker may have room again, or leaves."""
        if (session := self._sessions.get(worker.key)) is not None:
            self.worker_set(session.card).on_change(worker)
        self._notify()

    @property
    def has_all(self) -> bool:
        """Whether discovery has named workers, and requests can be sent to each of them."""
        if not 0 < len(self._view) <= len(self._sessions):  # Compared first: this is computed for each worker found.
            return False
        return self._view.keys() <= {one.record.instance_id for one in self._sessions.values()}

    @property
    def unreached_count(self) -> int:
        """How many of the workers that discovery names have no session for requests."""
        return len(self._view.keys() - {one.record.instance_id for one in self._sessions.values()})

    def quarantine(self, worker: Candidate) -> None:
        """Prefer other workers for a while."""
        self._quarantine_instance(worker.instance_id)
        worker.quarantined_until = self._quarantined[worker.instance_id]

    def _quarantine_instance(self, instance_id: str) -> None:
        """A quarantine outlives the session, because the next session of a failing worker is no more reliable."""
        self._quarantined[instance_id] = asyncio.get_running_loop().time() + self._config.quarantine_s

    @property
    def next_change(self) -> asyncio.Event:
        """Set when a session comes or goes, or its worker has room again or leaves. Get it before looking at the pool.

        It wakes every task that waits for it; requests that wait for room use the wait queue of their worker set.
        """
        return self._changed

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # For discovery

    def on_change(self, put: Mapping[str, InstanceRecord], gone: Collection[str]) -> None:
        """Instances in `put` are new or different; those in `gone` have left discovery's view."""
        before = [self._view.pop(instance_id, None) for instance_id in (*put, *gone)]
        self._view.update(put)
        self._catalog.note_registered(put.values(), [record for record in before if record is not None])
        self._unkept.update(dict.fromkeys(put))
        self._has_unkept.set()

    async def run(self) -> None:
        """Keep sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep())
            while True:
                await self._has_unkept.wait()
                self._has_unkept.clear()
                unkept, self._unkept = self._unkept, {}
                for instance_id in [one for one in unkept if one not in self._kept]:
                    self._kept.add(instance_id)
                    group.create_task(self._keep(instance_id))

    async def _keep(self, instance_id: str) -> None:
        """Keep a session to one instance, until the session is lost after the instance has left the view."""
        tries, outage = 0, _WorkerOutage()
        try:
            while (record := self._view.get(instance_id)) is not None:
                lost = await self._hold(record)
                if lost.was_found:
                    self._quarantine_instance(instance_id)
                outage.log_loss(record, lost)
                tries = 0 if lost.was_found else tries + 1
                await asyncio.sleep(self._config.reconnect.delay_s(tries, self._rng))
        finally:
            self._kept.discard(instance_id)
            self._quarantined.pop(instance_id, None)
            if instance_id in self._view:  # It has come back meanwhile.
                self._unkept[instance_id] = None
                self._has_unkept.set()

    async def _hold(self, record: InstanceRecord) -> _Loss:
        """Open one session and wait for its loss."""
        session = WorkerSession(
            record,
            self._config.session,
            on_change=self.on_worker_change,
            cancels=self.cancels,
            throttle=self._throttle,
            cork=self._cork,
            leftovers=self._leftovers,
            peers=self._peers,
        )
        welcome = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                admission = group.create_task(self._admit(session, welcome))
                await session.run(welcome)
        except ExceptionGroup as group:
            if not isinstance(failure := root_cause(group), Failure):
                raise
            return _Loss(
                failure,
                was_welcomed=welcome.is_set(),
                was_refused=not admission.cancelled() and admission.result() is failure,
                was_found=session.key in self._sessions,
                was_draining=session.candidate.is_draining,
            )
        finally:
            self._welcomed.pop(session, None)
            self.withdraw(session)
        raise AssertionError("a session ends with a failure")

    async def _admit(self, session: WorkerSession, welcome: asyncio.Event) -> Failure | None:
        """Wait for the welcome, learn the worker's model, and offer the session to requests.

        Returns why the worker cannot be used; None if it can.
        """
        await welcome.wait()
        self._welcomed[session] = None
        try:
            card = await self._catalog.learn(
                session.card, session.record.address, lambda: not self._is_served(session.card.model)
            )
        except Failure as failure:
            session.lose(failure)
            return failure
        except Exception as error:
            bug = bug_failure(error, f"(any) to {session.name}")
            session.lose(bug)
            return bug
        if not session.is_lost:
            session.set_card(card)
            session.candidate.quarantined_until = self._quarantined.get(session.record.instance_id, 0.0)
            log.info("worker found", instance=session.record.instance_id, address=session.record.address)
            self.offer(session)
        return None

    async def _sweep(self) -> None:
        """Check all sessions for silent workers, and send the keepalives that are due.

        Sessions are checked together, at least every quarter of `stall_s`, rather than each when it is due. If the
        frontend itself was late by half of `stall_s`, the silence of workers until then proves nothing.
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
