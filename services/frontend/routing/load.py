"""What a frontend knows of one worker's load, and for how long it may believe it.

| what | counts until |
| --- | --- |
| a rank's report | the next one, or REPORT_HEARTBEATS_MAX heartbeats: from then on the rank is unknown |
| the same, of a worker without requests, which reports seldom | IDLE_HEARTBEATS times as long |

A message with a load but without ranks is no report: it proves that the worker lives, and tells running and waiting.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.rpc.codec import seconds_from_wire
from services.stubs import worker_pb2

REPORT_HEARTBEATS_MAX = 3
IDLE_HEARTBEATS = 8
"""How many times longer than a heartbeat a worker is silent that has no requests: see its `idle_heartbeats`."""
HEARTBEAT_S = 0.25
"""Of a worker whose welcome names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """slots, places: N and Q, 0 where not known. running, waiting: by its last load, for all frontends; our
    own, where they are more; a refusal may be younger, and they below the limits then. service_s: how long a request
    holds a slot there, if it has said.
    """

    slots: int = 0
    places: int = 0
    running: int = 0
    waiting: int = 0
    service_s: float | None = None


class WorkerLoad:
    """What one worker said of itself, and which of that still counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._welcome = worker_pb2.Welcome()
        self._limit_s = REPORT_HEARTBEATS_MAX * HEARTBEAT_S
        self._reports: dict[int, tuple[float, worker_pb2.RankLoad]] = {}  # dp_rank → until when, what it said
        self._is_in_use = False
        self.last = worker_pb2.Load()

    def on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """Before all loads."""
        self._welcome = welcome
        self._limit_s = REPORT_HEARTBEATS_MAX * (seconds_from_wire(welcome.heartbeat) or HEARTBEAT_S)

    def add(self, load: worker_pb2.Load) -> None:
        """Take a load; ranks that it does not name keep what they said last."""
        self.last = load
        self._forget_overdue()
        is_idle = not (self._is_in_use or load.running or load.waiting)
        until = self._clock() + self._limit_s * (IDLE_HEARTBEATS if is_idle else 1)
        for rank in load.ranks:
            self._reports[rank.dp_rank] = (until, rank)

    def set_in_use(self, is_in_use: bool) -> None:
        """Whether the worker has streams of ours: from the first on it has a report due within a heartbeat."""
        self._is_in_use = is_in_use
        if is_in_use:
            latest = self._clock() + self._limit_s
            self._reports = {number: (min(until, latest), rank) for number, (until, rank) in self._reports.items()}

    def ranks(self) -> list[worker_pb2.RankLoad]:
        """Of the ranks whose report is not overdue, what they said last."""
        now = self._clock()
        return [rank for until, rank in self._reports.values() if now <= until]

    def _forget_overdue(self) -> None:
        now = self._clock()
        self._reports = {number: one for number, one in self._reports.items() if now <= one[0]}

    def occupancy(self, own_count: int) -> Occupancy:
        """How full the worker is, by its own last word; but that is from before a burst that we know of.

        own_count: our own requests on it, which run as far as there are slots.
        """
        load, slots = self.last, self._welcome.engine_request_limit
        running, waiting = load.running, load.waiting
        if slots and own_count > running + waiting:
            running = min(own_count, slots)
            waiting = own_count - running
        return Occupancy(
            slots=slots,
            places=self._welcome.request_queue_limit,
            running=running,
            waiting=waiting,
            service_s=seconds_from_wire(load.service_time) if load.HasField("service_time") else None,
        )
