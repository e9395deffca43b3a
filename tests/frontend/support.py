"""The worker's end of a session, played by a test without a connection."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.model_card import ModelCard
from services.discovery.client import InstanceRecord
from services.frontend.control import LocalControl
from services.frontend.resume.finder import GenerationFinder
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds
from services.frontend.routing.worker_set import WorkerSet
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.frontend.session.writer import CancelCounts
from services.rpc.codec import card_to_wire
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from tests.support.doubles import CARD, Collected, make_request
from tests.support.steps import step_of


def alone(
    thresholds: BusyThresholds | None = None, *, metrics: CollectorRegistry | None = None, gate: Gate | None = None
) -> LocalControl:
    """A frontend that is one process."""
    return LocalControl(metrics or CollectorRegistry(), gate or Gate(), thresholds or BusyThresholds(AdmissionConfig()))


class AllSessions:
    """The sessions of a frontend that has reached all its workers."""

    has_all = True

    def __init__(self, *sessions: WorkerSession) -> None:
        self.next_change = asyncio.Event()
        self._sessions = list(sessions)

    def all_sessions(self) -> list[WorkerSession]:
        return self._sessions


def finder_of(*sessions: WorkerSession) -> GenerationFinder:
    """Finds answers on the workers of these sessions."""
    return GenerationFinder(AllSessions(*sessions), random.Random(0))


class BareWorker:
    """A session without a connection, played from the worker's end. By default two requests run and one may wait."""

    def __init__(
        self,
        name: str = "i",
        slots: int = 2,
        places: int = 1,
        config: WorkerSessionConfig | None = None,
    ) -> None:
        self.changes_count = 0
        self.on_change: Callable[[Candidate], None] = lambda _: None
        self.cancels = CancelCounts()
        self.session = WorkerSession(
            InstanceRecord(name, "127.0.0.1:1", "m"),
            config or WorkerSessionConfig(full_s=60),
            on_change=self._count_change,
            cancels=self.cancels,
        )
        self.hear(
            welcome=worker_pb2.Welcome(
                instance_id=name,
                engine_request_limit=slots,
                request_queue_limit=places,
                card=card_to_wire(CARD),
            )
        )
        self.session.set_card(CARD)
        self.session._writer.pop_messages()  # What a frontend says of itself.

    @property
    def candidate(self) -> Candidate:
        """The worker as routing sees it."""
        return self.session.candidate

    def _count_change(self, worker: Candidate) -> None:
        self.changes_count += 1
        self.on_change(worker)

    def open(self, **call: Any) -> Stream:
        return self.session.open(make_request(), Call(**({"request_id": "r"} | call)), Collected())

    async def sent(self) -> worker_pb2.FrontendMessage:
        """All that was sent since it was last asked, as one message, once there is something."""
        while not self.has_sent:
            await asyncio.sleep(0)
        message = worker_pb2.FrontendMessage()
        for one in self.session._writer.pop_messages():
            message.MergeFrom(one)
        return message

    @property
    def has_sent(self) -> bool:
        """Whether `sent` would not wait."""
        return any(one.ByteSize() for one in self.session._writer._messages)

    # What it says

    def hear(self, **message: Any) -> None:
        self.session._reader.on_messages([worker_pb2.WorkerMessage(**message)])

    def begin(self, *stream_ids: int) -> None:
        self.hear(begun=stream_ids)

    def tokens(self, stream_id: int, position: int, *token_ids: int) -> None:
        self.hear(step=step_of((stream_id, position, token_ids)))

    def finish(self, *stream_ids: int) -> None:
        ends = [
            worker_pb2.StreamEnd(stream_id=one, finish_reason=FINISH_REASON_STOP, complete_final=True)
            for one in stream_ids
        ]
        self.hear(ends=ends)

    def refuse(self, *stream_ids: int, reason: Reason = Reason.WORKER_AT_CAPACITY, **metadata: str) -> None:
        error = worker_pb2.Error(reason=reason, detail="as told", metadata=metadata)
        self.hear(ends=[worker_pb2.StreamEnd(stream_id=one, error=error) for one in stream_ids])

    def vanish(self) -> None:
        self.session.lose(Failure(Reason.DISCONNECTED, "gone"))
        self.on_change(self.candidate)


class BareWorkers:
    """A pool as routing and transport see it."""

    def __init__(self, *workers: BareWorker) -> None:
        self._sessions = {one.session.key: one.session for one in workers}
        self._worker_set = WorkerSet(CARD)
        for one in workers:
            self._worker_set.add(one.candidate)
            one.on_change = self._worker_set.on_change

    def worker_set(self, card: ModelCard) -> WorkerSet:
        return self._worker_set

    def session(self, key: str) -> WorkerSession | None:
        return self._sessions.get(key)

    def candidate(self, key: str) -> Candidate | None:
        return None if (session := self.session(key)) is None else session.candidate

    def quarantine(self, worker: Candidate) -> None:
        worker.quarantined_until = float("inf")
