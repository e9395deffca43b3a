"""Session: all requests to one worker on one connection, and the proof that the worker lives.

`test_session_table.py` has the ways in which a session ends.
"""

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.call import Attempt, Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.discovery.client import InstanceRecord
from services.frontend.session import reader as reader_module
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.rpc.codec import card_to_wire, seconds_to_wire
from services.rpc.framing import FrameConnection
from services.rpc.status import MESSAGE_BYTES_MAX
from services.runtime.loop import Loop
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from tests.frontend.session.support import PATIENT, QUICK, Client, Peer, attach, failure_of, nothing, play
from tests.frontend.support import BareWorker
from tests.support.clock import pass_time, run_clocked
from tests.support.doubles import CARD, Collected, RecordingAttempt, make_request, run_async
from tests.support.raw_session import GREETING, RecordingTransport, frame
from tests.support.steps import step_of


def test_session_carries_many_requests_and_their_tokens() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submits = list((await peer.read()).submits)
        assert [submit.request.tokens.ids for submit in submits] == [[1, 2], [1, 2]]
        first, second = (submit.stream_id for submit in submits)
        await peer.tokens((first, 0, [7]), (second, 0, [8, 9]))
        await peer.tokens((second, 2, [10]))
        await peer.finish(first)
        await peer.finish(second)

    async def use(client: Client) -> None:
        (first, one), (second, two) = client.open(), client.open()
        assert client.session.candidate.in_flight_count == 2
        assert (await first.ended).reason is FinishReason.STOP
        await second.ended
        assert (one.token_ids, two.token_ids) == ([7], [8, 9, 10])
        assert client.session.candidate.in_flight_count == 0

    assert play(serve, use).reason is Reason.DISCONNECTED


def test_submit_has_the_time_left_until_the_deadline_and_the_request_id() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submit = (await peer.read()).submits[0]
        assert 50 < submit.timeout.seconds <= 60
        assert submit.request.request_id == "mine"
        await peer.finish(submit.stream_id)

    async def use(client: Client) -> None:
        await client.open(request_id="mine", deadline=asyncio.get_running_loop().time() + 60)[0].ended

    play(serve, use)


def test_closing_a_stream_cancels_it_and_drops_its_late_tokens() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        await peer.tokens((stream_id, 0, [7]))
        assert (await peer.read()).cancels == [stream_id]
        await peer.tokens((stream_id, 1, [8]))
        await peer.finish((await peer.read()).submits[0].stream_id)

    async def use(client: Client) -> None:
        stream, collected = client.open()
        while not collected.token_ids:
            await asyncio.sleep(0)
        client.session.close(stream)
        await client.open()[0].ended
        assert collected.token_ids == [7]

    assert play(serve, use).reason is Reason.DISCONNECTED


def test_many_long_prompts_are_sent_in_several_messages() -> None:
    prompt = tuple(range(2**28, 2**28 + 400_000))  # Five bytes each: ten are too many for a message.

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submits: list[worker_pb2.Submit] = []
        while len(submits) < 10:
            submits += (await peer.read()).submits
        for submit in submits:
            assert len(submit.request.tokens.ids) == len(prompt)
            await peer.finish(submit.stream_id)

    async def use(client: Client) -> None:
        streams = [client.session.open(make_request(prompt), Call(request_id="r"), Collected()) for _ in range(10)]
        for stream in streams:
            await stream.ended

    assert play(serve, use).reason is Reason.DISCONNECTED


def test_frontend_stays_with_a_worker_that_leaves_while_it_runs_answers_that_outlive_their_frontends() -> None:
    async def scenario() -> list[bool]:
        worker, lost = BareWorker(), []
        worker.hear(load=worker_pb2.Load(generations=1), goaway=worker_pb2.GoAway())
        lost.append(worker.session.is_lost)
        worker.hear(load=worker_pb2.Load())
        return [*lost, worker.session.is_lost]

    assert run_async(scenario()) == [False, True]


def test_request_that_is_too_large_to_send_is_refused_and_leaves_nothing() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(Failure) as caught:
            client.session.open(make_request(range(2**28, 2**28 + 2_000_000)), Call(request_id="r"), Collected())
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert client.session.candidate.in_flight_count == 0
        await client.open(deadline=1e300)[0].ended

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submits = (await peer.read()).submits
        assert len(submits) == 1
        await peer.finish(submits[0].stream_id)

    play(serve, use)


def test_no_stream_can_be_opened_on_a_lost_session() -> None:
    async def scenario() -> None:
        session = WorkerSession(InstanceRecord("i", "127.0.0.1:1", "m"), QUICK)
        session.lose(Failure(Reason.DISCONNECTED, "gone"))
        assert session.is_lost
        with pytest.raises(Failure) as caught:
            session.open(make_request(), Call(request_id="r"), Collected())
        assert caught.value.reason is Reason.CANNOT_CONNECT

    run_async(scenario())


# Connect


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "a\0b", ""], ids=["long", "empty label", "zero", "none"])
def test_address_without_a_valid_host_cannot_be_connected_to(host: str) -> None:
    """A bug: its look-up raised an unexpected error, and one worker with such an address ended every frontend."""
    assert run_async(attach(f"{host}:1", nothing, QUICK)).reason is Reason.CANNOT_CONNECT


def test_failure_names_why_each_of_several_addresses_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that the event loop raises for several different failures has no errno and so no `strerror`."""

    async def fail(*_: Any) -> None:
        raise OSError("Multiple exceptions: [Errno 111] Connection refused, [Errno 113] No route to host")

    monkeypatch.setattr(Loop, "create_connection", fail)

    failure = run_async(attach("two:1", nothing, QUICK))

    assert "Connection refused" in failure.detail
    assert "No route to host" in failure.detail


def test_failure_without_a_welcome_names_the_time_limit() -> None:
    async def silent(peer: Peer) -> None:
        await peer.raw.read()

    failure = play(silent, config=dataclasses.replace(QUICK, idle_stall_s=8))

    assert str(failure) == "CANNOT_CONNECT: no welcome from worker i within 0.3 s"


def test_failure_names_the_worker_that_answers_in_place_of_another() -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(welcome=worker_pb2.Welcome(instance_id="j", card=card_to_wire(CARD)))
        await peer.raw.read()

    failure = play(serve)

    assert failure.reason is Reason.CANNOT_CONNECT
    assert "worker i is gone: worker j answers at its address" in str(failure)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n",
            "does not speak the session protocol: is this the worker's session address?",
        ),
        (b"", "no welcome: the peer hung up"),
    ],
    ids=["HTTP", "nothing"],
)
def test_peer_that_is_no_worker_is_explained_in_the_failure_and_logged_nowhere(sent: bytes, why: str) -> None:
    """A bug: each attempt logged a message of 1213486160 bytes, without the address."""

    async def serve(peer: Peer) -> None:
        peer.raw.send_raw(sent)

    with capture_logs() as logs:
        failure = play(serve)

    assert failure.reason is Reason.CANNOT_CONNECT
    assert why in failure.detail
    assert logs == []


# Loss


def test_worker_that_leaves_as_announced_is_not_logged_as_broken() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(goaway=worker_pb2.GoAway())

    with capture_logs() as logs:
        failure = play(serve)

    assert str(failure) == "DRAINING: worker i left as announced"
    assert logs == []


def test_broken_connection_is_logged_with_its_cause() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()

    with capture_logs() as logs:
        play(serve)

    assert [(line["event"], line["why"]) for line in logs] == [("connection broke", "the peer hung up")]


@pytest.mark.parametrize(
    "sent",
    [frame(b"\xff\xff\xff\xff"), (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big")],
    ids=["garbage", "too large"],
)
def test_unreadable_message_ends_the_session_with_a_violation(sent: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        peer.raw.send_raw(sent)
        await peer.raw.read()

    assert play(serve).reason is Reason.PROTOCOL_VIOLATION


def test_idle_worker_may_be_silent_for_longer_than_one_with_streams() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.raw.until_over()

    config = WorkerSessionConfig(stall_s=0.1)

    async def use(client: Client) -> None:
        client.later_s = config.idle_stall_s / 2
        client.check()
        assert not client.session.is_lost
        client.later_s = config.idle_stall_s + 1

    assert play(serve, use, config).reason is Reason.STALLED


@pytest.mark.parametrize(("prefill_tokens", "is_lost"), [([0], True), ([0, 5], False), ([], False)])
def test_worker_whose_engine_stands_still_is_lost_unless_it_may_be_computing_a_prompt(
    prefill_tokens: list[int], is_lost: bool
) -> None:
    ranks = [worker_pb2.RankLoad(active_prefill_tokens=tokens) for tokens in prefill_tokens]
    load = worker_pb2.Load(running=1, engine_steps=9, ranks=ranks)

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        for _ in range(20):  # Twice `engine_stall_s`.
            await peer.send(load=load)
            await asyncio.sleep(0.01)
        await peer.finish(stream_id)

    async def use(client: Client) -> None:
        stream, _ = client.open()
        if is_lost:
            assert await failure_of(stream) is Reason.STALLED
        else:
            await stream.ended

    play(serve, use, dataclasses.replace(PATIENT, engine_stall_s=0.1))


def test_worker_that_sends_but_reads_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the buffer of what is sent to it would have no bound."""
    monkeypatch.setattr("services.frontend.session.writer.KEEPALIVE_S", 0.01)
    monkeypatch.setattr("services.frontend.session.writer.UNTAKEN_S_MAX", 0.3)
    prompt = tuple(range(2**28, 2**28 + 400_000))  # Five bytes each: ten are more than the kernel buffers.

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        while True:
            await peer.send(load=worker_pb2.Load())
            await asyncio.sleep(0.01)

    async def use(client: Client) -> None:
        for _ in range(10):
            stream = client.session.open(make_request(prompt), Call(request_id="r"), Collected())
            stream.ended.add_done_callback(lambda ended: ended.exception())

    assert play(serve, use).reason is Reason.STALLED


def test_silence_is_forgiven_while_the_frontend_itself_was_late() -> None:
    async def scenario() -> bool:
        session = WorkerSession(InstanceRecord("i", "127.0.0.1:1", "m"), QUICK)
        now = asyncio.get_running_loop().time() + 60
        session.forgive(now)
        session.check(now)
        return session.is_lost

    assert not run_async(scenario())


@pytest.mark.parametrize(
    ("load", "after_s"),
    [
        (None, 10),
        ({}, 1),
        ({"running": 1}, 1),
        ({"running": 1, "ranks": [{"active_prefill_tokens": 5}]}, 1),
        ({"running": 1, "ranks": [{"active_prefill_tokens": 0}]}, 0.5),
    ],
    ids=["idle", "in use", "its engine says nothing", "it computes a prompt", "it decodes"],
)
def test_check_returns_when_the_worker_may_be_lost_next(load: dict[str, Any] | None, after_s: float) -> None:
    async def scenario() -> float:
        config = WorkerSessionConfig(stall_s=1, idle_stall_s=10, engine_stall_s=0.5, prefill_stall_s=60)
        worker = BareWorker(config=config)
        if load is not None:
            worker.open()
            worker.hear(load=worker_pb2.Load(**load))
        return worker.session.check(asyncio.get_running_loop().time())

    assert run_clocked(scenario()) == after_s


def test_worker_whose_streams_all_have_their_finish_may_be_as_silent_as_an_idle_one() -> None:
    """A bug: it reports as rarely as one without requests, and was lost before `complete_final` was late."""

    async def scenario() -> list[float]:
        worker = BareWorker(config=WorkerSessionConfig(stall_s=1, idle_stall_s=10))
        stream = worker.open()
        due = [worker.session.check(0)]
        worker.hear(ends=[worker_pb2.StreamEnd(stream_id=stream.id, finish_reason=FINISH_REASON_STOP)])
        due.append(worker.session._liveness.check(0, has_streams=worker.session._streams.has_unfinished, stuck_at=99))
        pass_time(1.5)
        worker.session.check(1.5)
        worker.open()
        return [*due, worker.session._liveness.check(1.5, has_streams=True, stuck_at=99)]

    assert run_clocked(scenario()) == [1, 10, 2.5]


def test_silence_of_an_idle_worker_is_forgotten_when_its_first_stream_opens() -> None:
    async def scenario() -> float:
        worker = BareWorker(config=WorkerSessionConfig(stall_s=1, idle_stall_s=10))
        pass_time(9)
        worker.open()
        return worker.session.check(9)

    assert run_clocked(scenario()) == 10


def test_joining_a_stream_that_has_ended_does_not_forgive_silence() -> None:
    async def scenario() -> float:
        worker, choice_group = BareWorker(config=WorkerSessionConfig(stall_s=1, idle_stall_s=10)), ChoiceGroup(2)
        worker.open(choice_group=choice_group)
        worker.finish(1, 2)
        pass_time(9)
        worker.session.open(make_request(choice=1), Call(request_id="r", choice_group=choice_group), Collected())
        return worker.session.check(9)

    assert run_clocked(scenario()) == 10


def test_tokens_prove_that_the_engine_makes_steps() -> None:
    async def scenario() -> float:
        worker = BareWorker(config=WorkerSessionConfig(engine_stall_s=0.5))
        stream = worker.open()
        decodes = worker_pb2.Load(running=1, ranks=[worker_pb2.RankLoad()])
        worker.hear(load=decodes)
        pass_time(0.25)
        worker.tokens(stream.id, 0, 7)
        return worker.session.check(0.25)

    assert run_clocked(scenario()) == 0.75


def test_request_waits_while_the_worker_is_slow_to_read_and_is_sent_when_it_has_read() -> None:
    async def scenario() -> None:
        worker, wire = BareWorker(), RecordingTransport()
        connection: FrameConnection[worker_pb2.WorkerMessage] = FrameConnection(
            worker_pb2.WorkerMessage, is_opener=True
        )
        connection.connection_made(wire)
        worker.session._start(connection)
        connection.pause_writing()
        worker.open()
        await asyncio.sleep(0)
        assert wire.written == GREETING

        connection.resume_writing()

        assert len(wire.written) > len(GREETING)

    run_async(scenario())


def test_requests_of_each_turn_are_sent_in_the_next() -> None:
    async def scenario() -> list[int]:
        worker, wire = BareWorker(), RecordingTransport()
        connection: FrameConnection[worker_pb2.WorkerMessage] = FrameConnection(
            worker_pb2.WorkerMessage, is_opener=True
        )
        connection.connection_made(wire)
        worker.session._start(connection)
        counts = []
        for _ in range(2):
            worker.open()
            await asyncio.sleep(0)
            counts.append(len(wire.pieces))
        return counts

    assert run_async(scenario()) == [2, 3], "after the preamble, a message for each"


def test_candidate_of_a_lost_session_is_lost() -> None:
    async def scenario() -> bool:
        worker = BareWorker()
        worker.session.lose(Failure(Reason.DISCONNECTED, "gone"))
        return worker.candidate.is_lost

    assert run_async(scenario())


def test_messages_after_the_loss_are_ignored() -> None:
    async def scenario() -> tuple[bool, int]:
        worker = BareWorker()
        worker.session.lose(Failure(Reason.DISCONNECTED, "gone"))
        worker.hear(goaway=worker_pb2.GoAway())
        return worker.candidate.is_draining, worker.changes_count

    assert run_async(scenario()) == (False, 0)


def test_worker_is_lost_at_the_limit_and_needs_no_further_check() -> None:
    async def scenario() -> tuple[bool, float, bool]:
        session = BareWorker(config=WorkerSessionConfig(idle_stall_s=10)).session
        session.check(9.9)
        return session.is_lost, session.check(10), session.is_lost

    assert run_clocked(scenario()) == (False, math.inf, True)


# Messages


def test_parts_of_a_message_are_processed_in_the_order_of_the_proto_file() -> None:
    """The last tokens and ends of a worker precede its goaway: their streams need no other worker."""

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        ended, running = (submit.stream_id for submit in (await peer.read()).submits)
        end = worker_pb2.StreamEnd(stream_id=ended, finish_reason=FINISH_REASON_STOP, complete_final=True)
        await peer.send(begun=[running], ends=[end], goaway=worker_pb2.GoAway(grace=seconds_to_wire(30)))
        await peer.finish(running)

    async def use(client: Client) -> None:
        attempts = [RecordingAttempt(), RecordingAttempt()]
        streams = [client.open(attempt=attempt)[0] for attempt in attempts]
        for stream in streams:
            await stream.ended
        assert [attempt.grace_s for attempt in attempts] == [[], [30.0]]
        assert [attempt.has_begun for attempt in attempts] == [False, True]

    play(serve, use)


def test_goaway_marks_the_worker_as_draining_and_lets_streams_finish() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        await peer.send(goaway=worker_pb2.GoAway())
        await peer.finish(stream_id)

    async def use(client: Client) -> None:
        await client.open()[0].ended
        assert client.session.candidate.is_draining

    play(serve, use)


def test_frontend_hangs_up_on_a_leaving_worker_when_its_last_stream_has_ended_or_is_closed() -> None:
    hung_up: list[Sequence[int]] = []

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        ended, closed = (submit.stream_id for submit in (await peer.read()).submits)
        await peer.send(goaway=worker_pb2.GoAway())
        await peer.finish(ended)
        message = await peer.read()
        assert message.cancels == [closed], "the cancel is sent before the frontend hangs up"
        assert await peer.raw.read() is None
        hung_up.append(message.cancels)

    async def use(client: Client) -> None:
        (first, _), (second, _) = client.open(), client.open()
        await first.ended
        assert not client.session.is_lost
        client.session.close(second)
        assert client.session.is_lost

    assert str(play(serve, use)) == "DRAINING: worker i left as announced"
    assert hung_up


def test_frontend_does_not_hang_up_on_a_leaving_worker_before_every_choice_has_joined_its_stream() -> None:
    refused = worker_pb2.Error(reason="DRAINING", detail="this worker leaves")

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        (submit,) = (await peer.read()).submits
        await peer.send(goaway=worker_pb2.GoAway())
        ends = [worker_pb2.StreamEnd(stream_id=submit.stream_id + number, error=refused) for number in range(2)]
        await peer.send(ends=ends)
        assert await peer.raw.read() is None

    async def use(client: Client) -> None:
        group = ChoiceGroup(2, 0)
        first = client.session.open(make_request(), Call(request_id="r", choice_group=group), Collected())
        assert await failure_of(first) is Reason.DRAINING
        assert not client.session.is_lost
        second = client.session.open(make_request(choice=1), Call(request_id="r", choice_group=group), Collected())
        assert await failure_of(second) is Reason.DRAINING

    assert play(serve, use).reason is Reason.DRAINING


def test_frontend_stays_with_a_leaving_worker_while_requests_there_have_no_frontend() -> None:
    """They may have to be resumed through it: nobody else can reach the worker any more."""

    async def scenario() -> list[bool]:
        worker = BareWorker()
        is_lost = []
        worker.hear(load=worker_pb2.Load(running=1, generations=1), goaway=worker_pb2.GoAway())
        is_lost.append(worker.session.is_lost)
        worker.session.close(worker.open())
        is_lost.append(worker.session.is_lost)
        worker.hear(load=worker_pb2.Load())
        is_lost.append(worker.session.is_lost)
        return is_lost

    assert run_async(scenario()) == [False, False, True]


@pytest.mark.parametrize("leave", [WorkerSession.stop, WorkerSession.let_go])
def test_frontend_hangs_up_on_a_leaving_worker_when_it_has_let_go_of_its_last_stream(
    leave: Callable[[WorkerSession, Stream], None],
) -> None:
    async def scenario() -> bool:
        worker = BareWorker()
        stream = worker.open()
        worker.hear(goaway=worker_pb2.GoAway())
        assert not worker.session.is_lost
        leave(worker.session, stream)
        return worker.session.is_lost

    assert run_async(scenario())


def test_bug_in_a_goaway_callback_fails_that_request_alone() -> None:
    class BrokenAttempt(Attempt):
        def on_leaving(self, grace_s: float) -> None:
            raise RuntimeError("bug")

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submits = (await peer.read()).submits
        await peer.send(goaway=worker_pb2.GoAway())
        await peer.finish(submits[1].stream_id)

    async def use(client: Client) -> None:
        (bad, _), (good, _) = client.open(attempt=BrokenAttempt()), client.open()
        assert await failure_of(bad) is Reason.INTERNAL
        await good.ended

    play(serve, use)


def test_late_end_of_a_dropped_stream_is_ignored() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        bad, good = (submit.stream_id for submit in (await peer.read()).submits)
        unknown: Any = 99
        await peer.send(ends=[worker_pb2.StreamEnd(stream_id=bad, finish_reason=unknown)])
        await peer.send(ends=[worker_pb2.StreamEnd(stream_id=bad, complete_final=True)])
        assert (await peer.read()).cancels == [
            bad
        ]  # Otherwise the frontend may still write when the session has ended.
        await peer.finish(good)

    async def use(client: Client) -> None:
        (bad, _), (good, _) = client.open(), client.open()
        assert await failure_of(bad) is Reason.PROTOCOL_VIOLATION
        assert (await good.ended).reason is FinishReason.STOP

    assert play(serve, use).reason is Reason.DISCONNECTED


# Very many streams


def test_tokens_of_very_many_streams_are_delivered_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "STREAMS_AT_ONCE_MAX", 4)
    monkeypatch.setattr(reader_module, "STREAMS_A_TURN_MAX", 2)

    async def scenario() -> tuple[list[int], list[bool]]:
        worker = BareWorker(slots=5)
        streams = [worker.open() for _ in range(5)]
        ids = [stream.id for stream in streams]
        step = step_of(*((stream_id, 0, [7]) for stream_id in ids))
        end = worker_pb2.StreamEnd(stream_id=ids[0], finish_reason=FINISH_REASON_STOP, complete_final=True)
        worker.hear(step=step, ends=[end])
        counts, has_ended = [], []
        for _ in range(3):
            counts.append(sum(stream.position for stream in streams))
            has_ended.append(streams[0].ended.done())
            await asyncio.sleep(0)
        return counts, has_ended

    assert run_async(scenario()) == ([2, 4, 5], [False, False, True])


def test_worker_whose_tokens_wait_for_their_turn_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: when all turns together took longer than `stall_s`, the worker counted as lost."""
    monkeypatch.setattr(reader_module, "STREAMS_AT_ONCE_MAX", 4)
    monkeypatch.setattr(reader_module, "STREAMS_A_TURN_MAX", 2)

    async def scenario() -> list[bool]:
        worker, now = BareWorker(slots=5, config=WorkerSessionConfig(stall_s=1.0)), asyncio.get_running_loop().time()
        worker.session._liveness._clock = lambda: now
        ids = [worker.open().id for _ in range(5)]
        worker.hear(step=step_of(*((stream_id, 0, [7]) for stream_id in ids)))
        is_lost = []
        for _ in range(2):
            now += 0.8
            await asyncio.sleep(0)
            worker.session.check(now)
            is_lost.append(worker.session.is_lost)
        return is_lost

    assert run_async(scenario()) == [False, False]


def test_tokens_that_arrive_between_turns_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "STREAMS_AT_ONCE_MAX", 4)
    monkeypatch.setattr(reader_module, "STREAMS_A_TURN_MAX", 2)
    streams, rounds = 5, 50
    got: list[Collected] = []

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.read()
        for position in range(rounds):
            await peer.tokens(*((number + 1, position, [position]) for number in range(streams)))
        for number in range(streams):
            await peer.finish(number + 1)
        await peer.read()

    async def use(client: Client) -> None:
        for stream, collected in [client.open() for _ in range(streams)]:
            await stream.ended
            client.session.close(stream)
            got.append(collected)

    play(serve, use)

    assert [one.token_ids for one in got] == [list(range(rounds))] * streams
