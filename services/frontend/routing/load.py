"""The load that one worker reports, and how long a report counts.

| report | counts until |
| --- | --- |
| of a rank of a worker with requests | the next report of the rank, or `REPORT_HEARTBEATS_MAX` heartbeats |
| of a rank of an idle worker, which reports seldom | the next report of the rank, or `IDLE_HEARTBEATS` times as long |

A rank whose last report no longer counts is unknown. A load without ranks is a heartbeat: it proves that the worker
lives and has the numbers of running and waiting requests, but is no report.
"""

from collections.abc import Callable
from dataclasses import dataclass

from services.rpc.codec import seconds_from_wire
from services.stubs import worker_pb2

REPORT_HEARTBEATS_MAX = 3
IDLE_HEARTBEATS = 8
"""An idle worker sends every eighth heartbeat only: see the worker's `idle_heartbeats`."""
HEARTBEAT_S = 0.25
"""The time between two heartbeats of a worker whose welcome names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How full a worker is, as far as is known.

    `slots`, `places`: N and Q; 0 if unknown. `running`, `waiting`: the requests of all frontends by the last load, or
    our own if these are more. They may be below the limits even though the worker has refused a request since.
    `service_s`: how long a request holds a slot on average; None if unknown.
    """

    slots: int = 0
    places: int = 0
    running: int = 0
    waiting: int = 0
    service_s: float | None = None


class WorkerLoad:
    """The welcome and the load reports of one worker."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._welcome = worker_pb2.Welcome()
        self._limit_s = REPORT_HEARTBEATS_MAX * HEARTBEAT_S
        self._reports: dict[int, tuple[float, worker_pb2.RankLoad]] = {}  # dp_rank → until when it counts, report
        self._is_in_use = False
        self.last = worker_pb2.Load()

    def on_welcome(self, welcome: worker_pb2.Welcome) -> None:
        """The worker's limits and heartbeat. Must come before all loads."""
        self._welcome = welcome
        self._limit_s = REPORT_HEARTBEATS_MAX * (seconds_from_wire(welcome.heartbeat) or HEARTBEAT_S)

    def add(self, load: worker_pb2.Load) -> None:
        """Take a load. A rank that it does not name keeps its last report."""
        self.last = load
        self._forget_expired()
        is_idle = not (self._is_in_use or load.running or load.waiting)
        until = self._clock() + self._limit_s * (IDLE_HEARTBEATS if is_idle else 1)
        for rank in load.ranks:
            self._reports[rank.dp_rank] = (until, rank)

    def set_in_use(self, is_in_use: bool) -> None:
        """Whether the worker has requests of ours. It then reports with every heartbeat."""
        self._is_in_use = is_in_use
        if is_in_use:
            latest = self._clock() + self._limit_s
            self._reports = {number: (min(until, latest), rank) for number, (until, rank) in self._reports.items()}

    def ranks(self) -> list[worker_pb2.RankLoad]:
        """The last report of each rank, if it still counts."""
        now = self._clock()
        return [rank for until, rank in self._reports.values() if now <= until]

    def _forget_expired(self) -> None:
        now = self._clock()
        self._reports = {number: one for number, one in self._reports.items() if now <= one[0]}

    def occupancy(self, own_count: int) -> Occupancy:
        """How full the worker is.

        `own_count`: our own requests on it. The last load may be older than some of them, so it counts only if it has
        more. Of our own, as many run as there are slots.
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
