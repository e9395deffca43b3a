"""Candidate: the events on a session decide whether routing may choose its worker, and each change is announced."""

import asyncio
from functools import partial

import pytest

from services.core.errors import Failure, Reason, RefusedFor
from services.core.tenant import Tenant
from services.frontend.routing.load import Occupancy
from services.frontend.routing.state import Needs, State
from services.frontend.session.session import WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.stubs import worker_pb2
from tests.frontend.support import BareWorker
from tests.support.doubles import run_async

REPORT = worker_pb2.Load(ranks=[worker_pb2.RankLoad(kv_blocks_used=1, kv_blocks_total=2)])


def refuse(worker: BareWorker, *, count: int = 1, tokens: int = 0) -> None:
    """Tell the candidate of a refusal, as Route does: for prompt tokens if there are any."""
    bound = RefusedFor.QUEUE_TOKENS if tokens else RefusedFor.CAPACITY
    worker.candidate.on_refused(bound, count, tokens)


def end_with_refusal(worker: BareWorker, stream: Stream) -> None:
    """The worker refuses the stream for capacity, and Route tells the candidate."""
    worker.refuse(stream.id)
    assert isinstance(stream.ended.exception(), Failure)
    refuse(worker)


def test_a_refusal_counts_until_the_next_load_report_and_a_heartbeat_without_ranks_is_none() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        end_with_refusal(worker, worker.open())
        assert worker.candidate.capacity.is_full()

        worker.hear(load=worker_pb2.Load(running=3))
        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (True, 0)

        worker.hear(load=REPORT)
        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (False, 1)

    run_async(scenario())


def test_a_refusal_of_two_choices_leaves_room_for_one() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        refuse(worker, count=2)
        assert (worker.candidate.capacity.is_full(2), worker.candidate.capacity.is_full(1)) == (True, False)
        refuse(worker, count=1)
        assert worker.candidate.capacity.is_full(1)
        worker.session.lose(Failure(Reason.DISCONNECTED, "gone"))

    run_async(scenario())


@pytest.mark.parametrize("how", ["finished", "closed"])
def test_a_refusal_is_forgotten_when_one_of_our_streams_ends(how: str) -> None:
    async def scenario() -> None:
        worker = BareWorker()
        stream = worker.open()
        refuse(worker, count=1)

        if how == "closed":
            worker.session.close(stream)
        else:
            worker.finish(stream.id)

        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (False, 1)

    run_async(scenario())


def test_the_end_of_a_refused_stream_does_not_clear_a_refusal() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        first, second = worker.open(), worker.open()
        end_with_refusal(worker, first)
        end_with_refusal(worker, second)
        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (True, 0)

    run_async(scenario())


def test_the_end_of_a_stream_that_waited_too_long_clears_a_refusal() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        stream = worker.open()
        refuse(worker, count=1)

        worker.refuse(stream.id, cause="queue_timeout")

        assert isinstance(stream.ended.exception(), Failure)
        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (False, 1)

    run_async(scenario())


def test_the_end_of_a_stream_that_gave_way_does_not_clear_a_refusal() -> None:
    """Its place is another tenant's already."""

    async def scenario() -> None:
        worker = BareWorker()
        streams = [worker.open() for _ in range(3)]
        refuse(worker, count=1)

        worker.refuse(streams[2].id, cause="tenant_share")

        assert isinstance(streams[2].ended.exception(), Failure)
        assert (worker.candidate.in_flight_count, worker.changes_count) == (2, 0)
        assert worker.candidate.capacity.is_full()

    run_async(scenario())


def test_streams_count_for_their_tenants_and_a_full_worker_is_asked_for_a_tenant_that_has_less() -> None:
    """N = 2, Q = 1: the worker lets a request of the heavy tenant give way, or refuses."""

    async def scenario() -> None:
        worker, heavy, light = BareWorker(), Tenant(name="heavy"), Tenant(name="light")
        streams = [worker.open(tenant=heavy) for _ in range(3)]
        state = partial(worker.candidate.state, now=0.0)
        assert [state(Needs(tenant=one)) for one in (heavy, light)] == [State.FULL, State.HEALTHY]
        assert not worker.candidate.is_closed

        worker.open(tenant=light)
        worker.refuse(streams[2].id, cause="tenant_share")
        worker.candidate.on_refused(RefusedFor.TENANT_SHARE, 1, 0, heavy)

        assert worker.candidate.in_flight_count == 3
        assert [state(Needs(tenant=one)) for one in (heavy, light)] == [State.FULL, State.FULL]
        for stream in streams[:2]:
            worker.session.close(stream)
        assert [state(Needs(tenant=one)) for one in (heavy, light)] == [State.HEALTHY, State.HEALTHY]

    run_async(scenario())


@pytest.mark.parametrize("event", ["report", "end"])
def test_a_refusal_of_prompt_tokens_leaves_room_for_fewer_and_is_forgotten_on_the_same_events(event: str) -> None:
    async def scenario() -> None:
        worker = BareWorker()
        stream, refused = worker.open(), worker.open()
        worker.refuse(refused.id, cause="queue_tokens")
        assert isinstance(refused.ended.exception(), Failure)
        refuse(worker, tokens=100)
        assert [worker.candidate.capacity.is_full(1, tokens) for tokens in (0, 99, 100)] == [False, False, True]
        assert worker.changes_count == 0

        if event == "report":
            worker.hear(load=REPORT)
        else:
            worker.session.close(stream)

        assert (worker.candidate.capacity.is_full(1, 100), worker.changes_count) == (False, 1)

    run_async(scenario())


def test_the_end_of_a_stream_refused_for_its_tokens_does_not_clear_a_refusal() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        stream = worker.open()
        refuse(worker, tokens=100)

        worker.refuse(stream.id, cause="queue_tokens")

        assert isinstance(stream.ended.exception(), Failure)
        assert (worker.candidate.capacity.is_full(1, 100), worker.changes_count) == (True, 0)

    run_async(scenario())


def test_a_worker_is_full_with_as_many_of_our_streams_as_its_request_limit() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        streams = []
        for _ in range(3):
            assert not worker.candidate.capacity.is_full()
            streams.append(worker.open())
        assert worker.candidate.capacity.is_full()
        assert worker.candidate.occupancy == Occupancy(slots=2, places=1, running=2, waiting=1)
        worker.hear(load=REPORT)
        assert worker.candidate.capacity.is_full()

        worker.session.close(streams[1])

        assert (worker.candidate.capacity.is_full(), worker.changes_count) == (False, 1)

    run_async(scenario())


def test_a_worker_without_a_request_limit_is_full_only_after_a_refusal() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        worker.candidate.on_welcome(worker_pb2.Welcome(instance_id="i"))
        for _ in range(50):
            worker.open()
        assert not worker.candidate.capacity.is_full()

    run_async(scenario())


def test_a_lost_session_leaves_no_refusal_and_no_timer() -> None:
    async def scenario() -> None:
        worker = BareWorker(config=WorkerSessionConfig(full_s=0.01))
        for _ in range(2):
            refuse(worker, count=1)
            refuse(worker, tokens=100)
            worker.session.lose(Failure(Reason.DISCONNECTED, "gone"))
        assert not worker.candidate.capacity.is_full(1, 100)

    run_async(scenario())


def test_a_worker_with_our_streams_counts_as_in_use_until_the_last_one_ends() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        worker.hear(load=REPORT)
        stream = worker.open()
        assert worker.candidate.load._is_in_use
        assert len(worker.candidate.ranks()) == 1
        worker.session.close(stream)
        assert not worker.candidate.load._is_in_use

    run_async(scenario())


def test_on_change_is_called_when_a_refusal_expires_and_when_the_worker_leaves() -> None:
    async def scenario() -> None:
        worker = BareWorker(config=WorkerSessionConfig(full_s=0.01))
        refuse(worker, count=1)
        while not worker.changes_count:
            await asyncio.sleep(0)
        assert not worker.candidate.capacity.is_full()
        worker.hear(goaway=worker_pb2.GoAway())
        assert worker.changes_count == 2

    run_async(scenario())


def test_events_after_the_loss_of_the_session_change_nothing() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        worker.open()
        worker.candidate.on_lost()
        worker.candidate.on_closed(frees_room=True)
        refuse(worker)
        assert (worker.candidate.in_flight_count, worker.candidate.capacity.is_full(), worker.changes_count) == (
            0,
            False,
            0,
        )

    run_async(scenario())
