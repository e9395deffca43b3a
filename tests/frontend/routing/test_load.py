"""Worker load: a report of a rank counts until the next one, or for a bounded time."""

import pytest

from services.frontend.routing.load import Occupancy, WorkerLoad
from services.rpc.codec import seconds_to_wire
from services.stubs import worker_pb2

BEAT_S = 1.0
OVERDUE_S = 3.01


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> WorkerLoad:
    """The load of a worker that has our requests and a heartbeat of one second."""
    load = WorkerLoad(clock)
    load.on_welcome(
        worker_pb2.Welcome(engine_request_limit=4, request_queue_limit=2, heartbeat=seconds_to_wire(BEAT_S))
    )
    load.set_in_use(True)
    return load


def report(*ranks: int, used: int = 5, running: int = 0) -> worker_pb2.Load:
    said = [worker_pb2.RankLoad(dp_rank=rank, kv_blocks_used=used) for rank in ranks]
    return worker_pb2.Load(ranks=said, running=running)


def known(load: WorkerLoad) -> dict[int, int]:
    return {rank.dp_rank: rank.kv_blocks_used for rank in load.ranks()}


def test_no_rank_is_known_before_the_first_report(load: WorkerLoad) -> None:
    assert known(load) == {}


def test_a_report_counts_for_three_heartbeats(load: WorkerLoad, clock: Clock) -> None:
    load.add(report(0))

    clock.now += 3 * BEAT_S
    assert known(load) == {0: 5}
    clock.now += 0.01
    assert known(load) == {}


def test_the_report_of_each_rank_expires_on_its_own(load: WorkerLoad, clock: Clock) -> None:
    load.add(report(0, 1))
    clock.now += 2
    load.add(report(1, used=9))
    assert known(load) == {0: 5, 1: 9}

    clock.now += 2
    assert known(load) == {1: 9}


def test_a_heartbeat_without_ranks_does_not_prolong_a_report(load: WorkerLoad, clock: Clock) -> None:
    load.add(report(0))
    for _ in range(4):
        clock.now += BEAT_S
        load.add(worker_pb2.Load(running=3))

    assert known(load) == {}
    assert load.occupancy(0).running == 3


def test_a_report_of_an_idle_worker_counts_eight_times_as_long(load: WorkerLoad, clock: Clock) -> None:
    load.set_in_use(False)
    load.add(report(0))

    clock.now += 8 * 3 * BEAT_S
    assert known(load) == {0: 5}
    clock.now += 0.01
    assert known(load) == {}


@pytest.mark.parametrize("own", [True, False], ids=["ours", "of another frontend"])
def test_a_report_of_a_worker_with_requests_counts_for_three_heartbeats(
    load: WorkerLoad, clock: Clock, own: bool
) -> None:
    load.set_in_use(own)
    load.add(report(0, running=1))

    clock.now += OVERDUE_S
    assert known(load) == {}


def test_a_report_counts_for_three_heartbeats_from_when_an_idle_worker_gets_a_request(
    load: WorkerLoad, clock: Clock
) -> None:
    load.set_in_use(False)
    load.add(report(0))
    clock.now += 7 * BEAT_S
    load.set_in_use(True)

    assert known(load) == {0: 5}
    clock.now += OVERDUE_S
    assert known(load) == {}


def test_an_expired_report_stays_expired_when_the_worker_becomes_idle(load: WorkerLoad, clock: Clock) -> None:
    load.add(report(0))
    clock.now += OVERDUE_S

    load.set_in_use(False)

    assert known(load) == {}


def test_expired_reports_are_dropped(load: WorkerLoad, clock: Clock) -> None:
    for rank in range(100):
        load.add(report(rank))
        clock.now += BEAT_S

    assert len(load._reports) <= 4


def test_a_welcome_without_a_heartbeat_means_a_quarter_of_a_second(clock: Clock) -> None:
    load = WorkerLoad(clock)
    load.on_welcome(worker_pb2.Welcome())
    load.set_in_use(True)
    load.add(report(0))

    clock.now += 0.75
    assert known(load) == {0: 5}
    clock.now += 0.01
    assert known(load) == {}


def test_occupancy_has_the_limits_of_the_welcome_and_the_numbers_of_the_last_load(load: WorkerLoad) -> None:
    assert load.occupancy(0) == Occupancy(slots=4, places=2)
    load.add(worker_pb2.Load(running=3, waiting=1, service_time=seconds_to_wire(1.5)))

    assert load.occupancy(0) == Occupancy(slots=4, places=2, running=3, waiting=1, service_s=1.5)


@pytest.mark.parametrize(("own_count", "running", "waiting"), [(4, 3, 1), (5, 4, 1), (6, 4, 2), (3, 3, 1)])
def test_occupancy_counts_our_own_requests_if_they_are_more_than_the_last_load_has(
    load: WorkerLoad, own_count: int, running: int, waiting: int
) -> None:
    load.add(worker_pb2.Load(running=3, waiting=1))

    assert load.occupancy(own_count) == Occupancy(slots=4, places=2, running=running, waiting=waiting)


def test_occupancy_of_a_worker_without_limits_ignores_our_own_requests(clock: Clock) -> None:
    assert WorkerLoad(clock).occupancy(5) == Occupancy()
