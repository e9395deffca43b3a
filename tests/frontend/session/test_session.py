"""Session: all requests to one worker on one stream, and the proof that the worker lives."""

import asyncio
import dataclasses
import gc
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from services.core.call import Attempt, Call
from services.core.choice_group import ChoiceGroup
from services.core.errors import Failure, Reason
from services.core.request import FinishReason
from services.discovery.client import InstanceRecord
from services.frontend.session import reader as reader_module
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.frontend.session.writer import CancelCounts
from services.rpc.codec import card_to_wire, seconds_to_wire
from services.rpc.status import MESSAGE_BYTES_MAX
from services.runtime.loop import Loop
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from tests.frontend.support import BareWorker
from tests.support.clock import run_clocked
from tests.support.doubles import CARD, Collected, RecordingAttempt, make_request, run_async
from tests.support.raw_session import RawSession, frame, serve_raw_sessions
from tests.support.steps import step_of

WELCOME = worker_pb2.Welcome(instance_id="i", card=card_to_wire(CARD))
PATIENT = WorkerSessionConfig(stall_s=8, full_s=60)
"""On a busy machine either end may be late."""
QUICK = WorkerSessionConfig(connect_timeout_s=0.3, stall_s=0.05)
"""For what is to be lost."""
Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The worker's end of a session, played by a test."""

    def __init__(self, line: RawSession) -> None:
        self.line = line

    async def welcome(self) -> None:
        await self.send(welcome=WELCOME)

    async def send(self, **fields: Any) -> None:
        await self.line.send(worker_pb2.WorkerMessage(**fields))

    async def read(self) -> worker_pb2.FrontendMessage:
        message = await self.line.read()
        assert isinstance(message, worker_pb2.FrontendMessage)
        return message

    async def tokens(self, *entries: tuple[int, int, list[int]]) -> None:
        await self.send(step=step_of(*entries))

    async def finish(self, stream_id: int) -> None:
        end = worker_pb2.StreamEnd(stream_id=stream_id, finish_reason=FINISH_REASON_STOP, complete_final=True)
        await self.send(ends=[end])


class Client:
    """The frontend's end, as the pool drives it. later_s: how much later than it is the session is told."""

    def __init__(self, session: WorkerSession) -> None:
        self.session = session
        self.lost: Failure | None = None
        self.later_s = 0.0

    def check(self) -> None:
        self.session.check(asyncio.get_running_loop().time() + self.later_s)

    def open(self, **call: Any) -> tuple[Stream, Collected]:
        collected = Collected()
        return self.session.open(make_request(), Call(**({"request_id": "r"} | call)), collected), collected


Use = Callable[[Client], Awaitable[None]]


async def nothing(_: Client) -> None:
    """Only wait for the loss."""


def playing(serve: Serve) -> AbstractAsyncContextManager[str]:
    return serve_raw_sessions(lambda line: serve(Peer(line)))


def play(serve: Serve, use: Use = nothing, config: WorkerSessionConfig = PATIENT) -> Failure:
    """A session between `serve` and `use`; how it was lost."""

    async def scenario() -> Failure:
        async with playing(serve) as address:
            return await attach(address, use, config)

    return run_async(scenario())


async def attach(address: str, use: Use, config: WorkerSessionConfig) -> Failure:
    client = Client(WorkerSession(InstanceRecord("i", address, "m"), config))
    on_welcome = asyncio.Event()

    async def run() -> None:
        try:
            await client.session.run(on_welcome)
        except Failure as failure:
            client.lost = failure

    async def use_it() -> None:
        await on_welcome.wait()
        await use(client)

    async def sweep() -> None:
        while client.lost is None:
            client.check()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        user = group.create_task(use_it())
        group.create_task(sweep())
        await run()
        if not on_welcome.is_set():
            user.cancel()
    assert client.lost is not None
    return client.lost


async def failure_of(stream: Stream) -> Reason:
    with pytest.raises(Failure) as caught:
        await stream.ended
    return caught.value.reason


def test_carries_many_requests_and_their_tokens_side_by_side() -> None:
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


def test_sends_what_is_left_of_the_deadline_and_the_request_id() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        submit = (await peer.read()).submits[0]
        assert 50 < submit.timeout.seconds <= 60
        assert submit.request.request_id == "mine"
        await peer.finish(submit.stream_id)

    async def use(client: Client) -> None:
        await client.open(request_id="mine", deadline=asyncio.get_running_loop().time() + 60)[0].ended

    play(serve, use)


def test_tells_the_worker_when_a_request_is_given_up_and_lets_no_late_token_through() -> None:
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


def test_many_long_prompts_at_once_do_not_make_one_message_too_large() -> None:
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


def test_cannot_connect_to_a_port_where_nobody_listens() -> None:
    assert run_async(attach("127.0.0.1:1", nothing, QUICK)).reason is Reason.CANNOT_CONNECT


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "a\0b", ""], ids=["long", "empty label", "zero", "none"])
def test_cannot_connect_to_what_is_no_host(host: str) -> None:
    """A bug: looking it up raised what nobody expected, and one worker with such an address ended every frontend."""
    assert run_async(attach(f"{host}:1", nothing, QUICK)).reason is Reason.CANNOT_CONNECT


def test_says_why_none_of_several_addresses_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loop raises where each of them fails in a way of its own has no number: no words of the system."""

    async def fail(*_: Any) -> None:
        raise OSError("Multiple exceptions: [Errno 111] Connection refused, [Errno 113] No route to host")

    monkeypatch.setattr(Loop, "create_connection", fail)

    failure = run_async(attach("two:1", nothing, QUICK))

    assert "Connection refused" in failure.detail
    assert "No route to host" in failure.detail


def test_cannot_connect_without_a_welcome_in_time() -> None:
    async def silent(peer: Peer) -> None:
        await peer.line.read()

    failure = play(silent, config=dataclasses.replace(QUICK, idle_stall_s=8))

    assert str(failure) == "CANNOT_CONNECT: no welcome from worker i within 0.3 s"


def test_cannot_connect_when_the_first_message_is_no_welcome() -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(load=worker_pb2.Load())

    assert play(serve).reason is Reason.CANNOT_CONNECT


def test_a_worker_that_answers_for_another_is_not_taken_for_it() -> None:
    async def serve(peer: Peer) -> None:
        await peer.send(welcome=worker_pb2.Welcome(instance_id="j", card=card_to_wire(CARD)))
        await peer.line.read()

    failure = play(serve)

    assert failure.reason is Reason.CANNOT_CONNECT
    assert "worker i is gone: worker j answers at its address" in str(failure)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no message of a session: is this the worker's session address?"),
        (b"", "no welcome: the other end hung up"),
    ],
    ids=["HTTP", "nothing"],
)
def test_what_listens_there_and_is_no_worker_is_told_by_whoever_opens_it_alone(sent: bytes, why: str) -> None:
    """Once the log had a line about a message of 1213486160 bytes for each try, and no address."""

    async def serve(peer: Peer) -> None:
        peer.line.send_raw(sent)

    with capture_logs() as logs:
        failure = play(serve)

    assert failure.reason is Reason.CANNOT_CONNECT
    assert why in failure.detail
    assert logs == []


def test_a_worker_that_leaves_as_it_has_said_breaks_nothing() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(goaway=worker_pb2.GoAway())

    with capture_logs() as logs:
        failure = play(serve)

    assert str(failure) == "DRAINING: worker i left as it had said"
    assert logs == []


def test_a_connection_that_breaks_is_spoken_of_in_other_words_than_its_why() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()

    with capture_logs() as logs:
        play(serve)

    assert [(line["event"], line["why"]) for line in logs] == [("connection broke", "the other end hung up")]


async def cut(peer: Peer) -> None:
    peer.line.abort()


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda peer: peer.send(goaway=worker_pb2.GoAway()), Reason.STREAM_INCOMPLETE),
        (lambda peer: asyncio.sleep(0), Reason.DISCONNECTED),
        (cut, Reason.DISCONNECTED),
        (lambda peer: asyncio.sleep(60), Reason.STALLED),
    ],
    ids=["ended after a goaway", "closed", "broken", "silent"],
)
def test_its_streams_fail_when_the_session_is(leave: Callable[[Peer], Awaitable[None]], reason: Reason) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.tokens(((await peer.read()).submits[0].stream_id, 0, [7]))
        await leave(peer)

    async def use(client: Client) -> None:
        stream, collected = client.open()
        while not collected.token_ids:
            await asyncio.sleep(0)
        if reason is Reason.STALLED:
            client.later_s = 2 * PATIENT.stall_s
        assert await failure_of(stream) is reason
        assert collected.token_ids == [7]

    assert play(serve, use).reason is reason


@pytest.mark.parametrize(
    "sent",
    [frame(b"\xff\xff\xff\xff"), (MESSAGE_BYTES_MAX + 1).to_bytes(4, "big")],
    ids=["garbage", "too large"],
)
def test_a_message_that_cannot_be_read_ends_the_session_with_a_violation(sent: bytes) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        peer.line.send_raw(sent)
        await peer.line.read()

    assert play(serve).reason is Reason.PROTOCOL_VIOLATION


def test_an_idle_worker_is_allowed_a_longer_silence_than_one_with_streams() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.line.until_over()

    config = WorkerSessionConfig(stall_s=0.1)

    async def use(client: Client) -> None:
        client.later_s = config.idle_stall_s / 2
        client.check()
        assert not client.session.is_lost
        client.later_s = config.idle_stall_s + 1

    assert play(serve, use, config).reason is Reason.STALLED


@pytest.mark.parametrize(("prefill_tokens", "is_lost"), [([0], True), ([0, 5], False), ([], False)])
def test_a_dead_engine_under_a_live_server_is_lost_unless_it_computes_a_prompt_or_may_do_so_for_all_it_says(
    prefill_tokens: list[int], is_lost: bool
) -> None:
    ranks = [worker_pb2.RankLoad(active_prefill_tokens=tokens) for tokens in prefill_tokens]
    load = worker_pb2.Load(running=1, engine_steps=9, ranks=ranks)

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        for _ in range(20):  # Twice engine_stall_s.
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


def test_a_worker_that_speaks_and_takes_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be sent to it would have no bound."""
    monkeypatch.setattr("services.frontend.session.writer.KEEPALIVE_S", 0.01)
    monkeypatch.setattr("services.frontend.session.writer.UNTAKEN_S_MAX", 0.3)
    prompt = tuple(range(2**28, 2**28 + 400_000))  # Five bytes each: ten are more than the kernel keeps.

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


def test_forgives_silence_while_the_frontend_itself_was_late() -> None:
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
    ids=["idle", "in use", "its engine says nothing", "it computes a prompt", "it makes steps"],
)
def test_says_when_it_may_be_lost_next(load: dict[str, Any] | None, after_s: float) -> None:
    async def scenario() -> float:
        config = WorkerSessionConfig(stall_s=1, idle_stall_s=10, engine_stall_s=0.5, prefill_stall_s=60)
        worker = BareWorker(config=config)
        if load is not None:
            worker.open()
            worker.hear(load=worker_pb2.Load(**load))
        return worker.session.check(asyncio.get_running_loop().time())

    assert run_clocked(scenario()) == after_s


def test_what_is_lost_is_lost_at_that_moment_and_need_not_be_looked_at_again() -> None:
    async def scenario() -> tuple[bool, float, bool]:
        session = BareWorker(config=WorkerSessionConfig(idle_stall_s=10)).session
        session.check(9.9)
        return session.is_lost, session.check(10), session.is_lost

    assert run_clocked(scenario()) == (False, math.inf, True)


def test_an_item_after_the_marker_ends_the_session_with_a_violation() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        await peer.finish(stream_id)
        await peer.tokens((stream_id, 0, [7]))
        await peer.line.read()

    async def use(client: Client) -> None:
        await client.open()[0].ended

    assert play(serve, use).reason is Reason.PROTOCOL_VIOLATION


def test_a_violation_of_one_stream_leaves_the_others_alone() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        bad, good = (submit.stream_id for submit in (await peer.read()).submits)
        await peer.tokens((bad, 5, [7]), (good, 0, [8]))
        assert (await peer.read()).cancels == [bad]
        await peer.finish(good)

    async def use(client: Client) -> None:
        (bad, _), (good, collected) = client.open(), client.open()
        assert await failure_of(bad) is Reason.PROTOCOL_VIOLATION
        assert (await good.ended).reason is FinishReason.STOP
        assert collected.token_ids == [8]

    play(serve, use)


def test_counts_a_cancel_for_each_stream_that_had_not_ended_and_the_tokens_that_came_all_the_same() -> None:
    async def scenario() -> None:
        bare = BareWorker()
        ended, cancelled = bare.open(), bare.open()
        bare.finish(ended.id)
        for stream in (ended, cancelled, cancelled):
            bare.session.close(stream)
        bare.tokens(cancelled.id, 0, 7, 8, 9)
        assert bare.cancels == CancelCounts(signals=1, late_tokens=3)

    run_async(scenario())


def test_a_goaway_marks_it_draining_and_lets_streams_finish() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        stream_id = (await peer.read()).submits[0].stream_id
        await peer.send(goaway=worker_pb2.GoAway())
        await peer.finish(stream_id)

    async def use(client: Client) -> None:
        await client.open()[0].ended
        assert client.session.candidate.is_draining

    play(serve, use)


def test_opens_nothing_once_it_is_lost() -> None:
    async def scenario() -> None:
        session = WorkerSession(InstanceRecord("i", "127.0.0.1:1", "m"), QUICK)
        session.lose(Failure(Reason.DISCONNECTED, "gone"))
        assert session.is_lost
        with pytest.raises(Failure) as caught:
            session.open(make_request(), Call(request_id="r"), Collected())
        assert caught.value.reason is Reason.CANNOT_CONNECT

    run_async(scenario())


def test_its_streams_fail_when_whoever_runs_it_is_cancelled() -> None:
    """A bug: they hung for ever, for the loss was a future that the cancellation cancelled."""

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.line.read()
        await peer.line.read()

    async def scenario() -> Reason:
        async with playing(serve) as address:
            session, welcome = WorkerSession(InstanceRecord("i", address, "m"), WorkerSessionConfig()), asyncio.Event()
            running = asyncio.ensure_future(session.run(welcome))
            await welcome.wait()
            stream = session.open(make_request(), Call(request_id="r"), Collected())
            running.cancel()
            await asyncio.wait([running])
            return await failure_of(stream)

    assert run_async(scenario()) is Reason.DISCONNECTED


@pytest.mark.parametrize(
    "step",
    [
        worker_pb2.Step(stream_ids=[1], positions=[0], token_counts=[5], token_ids=[7, 8]),
        worker_pb2.Step(stream_ids=[1, 1], positions=[0], token_counts=[1], token_ids=[7]),
        worker_pb2.Step(stream_ids=[1]),
    ],
    ids=["too few tokens", "too few positions", "no columns"],
)
def test_columns_of_unequal_length_end_the_session(step: worker_pb2.Step) -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.read()
        await peer.send(step=step)
        await peer.line.read()

    async def use(client: Client) -> None:
        assert await failure_of(client.open()[0]) is Reason.PROTOCOL_VIOLATION

    assert play(serve, use).reason is Reason.PROTOCOL_VIOLATION


def test_the_marker_of_a_stream_that_was_dropped_harms_nobody() -> None:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        bad, good = (submit.stream_id for submit in (await peer.read()).submits)
        unknown: Any = 99
        await peer.send(ends=[worker_pb2.StreamEnd(stream_id=bad, finish_reason=unknown)])
        await peer.send(ends=[worker_pb2.StreamEnd(stream_id=bad, complete_final=True)])
        assert (await peer.read()).cancels == [bad]  # Else the client may still write when the session has ended.
        await peer.finish(good)

    async def use(client: Client) -> None:
        (bad, _), (good, _) = client.open(), client.open()
        assert await failure_of(bad) is Reason.PROTOCOL_VIOLATION
        assert (await good.ended).reason is FinishReason.STOP

    assert play(serve, use).reason is Reason.DISCONNECTED


def test_a_request_too_large_to_send_is_refused_and_leaves_nothing() -> None:
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


def test_takes_a_message_in_the_order_that_the_proto_says() -> None:
    """A worker's last tokens and ends come before its goaway: those streams need no other worker."""

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


def test_a_bug_in_whoever_is_told_of_a_goaway_fails_that_request_alone() -> None:
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


# The choices of a party


def join(bare: BareWorker, choice: int, choice_group: ChoiceGroup) -> tuple[Stream, Collected]:
    collected = Collected()
    call = Call(request_id="r", choice_group=choice_group)
    return bare.session.open(make_request(choice=choice), call, collected), collected


def test_the_first_choice_sends_one_message_for_all_and_the_others_join() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(3)
        streams = [join(bare, choice, choice_group)[0] for choice in (2, 0, 1)]

        [submit] = (await bare.sent()).submits
        assert (submit.stream_id, submit.choices, submit.request.choice) == (1, 3, 0)
        assert [stream.id for stream in streams] == [3, 1, 2]
        alone = bare.open()
        assert (alone.id, (await bare.sent()).submits[0].choices) == (4, 1)

    run_async(scenario())


def test_all_of_them_count_from_the_first_message_on() -> None:
    async def scenario() -> None:
        bare = BareWorker(slots=2, places=2)
        join(bare, 0, ChoiceGroup(3))
        assert bare.candidate.in_flight_count == 3
        assert not bare.candidate.capacity.is_full()
        assert bare.candidate.capacity.is_full(2)

    run_async(scenario())


def test_what_comes_for_a_choice_before_itself_waits_for_it() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        join(bare, 0, choice_group)
        bare.begin(1, 2)
        bare.tokens(2, 0, 7, 8)
        bare.tokens(2, 2, 9)
        bare.finish(2)

        collected, attempt = Collected(), RecordingAttempt()
        call = Call(request_id="r", choice_group=choice_group, attempt=attempt)
        stream = bare.session.open(make_request(choice=1), call, collected)

        assert (await stream.ended).reason is FinishReason.STOP
        assert [(delta.choice, list(delta.token_ids)) for delta in collected.deltas] == [(1, [7, 8]), (1, [9])]
        assert (attempt.begun_count, attempt.has_begun) == (1, True)

    run_async(scenario())


def test_a_choice_that_was_refused_before_it_came_is_told_when_it_comes() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        first, _ = join(bare, 0, choice_group)
        bare.refuse(1, 2)
        second, _ = join(bare, 1, choice_group)
        assert [await failure_of(first), await failure_of(second)] == [Reason.WORKER_AT_CAPACITY] * 2

    run_async(scenario())


@pytest.mark.parametrize(("says", "signals"), [("nothing", 2), ("refused", 0), ("lost", 0)])
def test_a_place_that_nobody_takes_is_given_back_with_a_cancel_if_the_worker_still_has_it(
    says: str, signals: int
) -> None:
    async def scenario() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        bare, choice_group = BareWorker(), ChoiceGroup(3)
        first, _ = join(bare, 0, choice_group)
        await bare.sent()
        if says == "refused":
            bare.refuse(1, 2, 3)
        elif says == "lost":
            bare.vanish()

        choice_group.release()

        assert bare.cancels.signals == signals
        assert bare.candidate.in_flight_count == (1 if says == "nothing" else 0)
        if says == "nothing":
            assert (await bare.sent()).cancels == [2, 3]
        else:
            assert isinstance(first.ended.exception(), Failure)
        gc.collect()
        assert complaints == []

    run_async(scenario())


def test_a_choice_that_comes_after_the_loss_is_told_of_it_and_its_place_leaves_nothing() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        first, _ = join(bare, 0, choice_group)
        bare.vanish()
        with pytest.raises(Failure) as caught:
            join(bare, 1, choice_group)
        assert caught.value.reason is Reason.CANNOT_CONNECT
        assert await failure_of(first) is Reason.DISCONNECTED
        choice_group.release()
        assert bare.cancels.signals == 0

    run_async(scenario())


def test_choices_that_are_too_large_to_send_are_all_told_and_leave_nothing() -> None:
    async def scenario() -> None:
        bare, choice_group = BareWorker(), ChoiceGroup(2)
        large = make_request(range(2**28, 2**28 + 2_000_000))
        for choice in (0, 1):
            with pytest.raises(Failure) as caught:
                bare.session.open(
                    replace(large, choice=choice), Call(request_id="r", choice_group=choice_group), Collected()
                )
            assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert bare.candidate.in_flight_count == 0

    run_async(scenario())


# Very many streams


def test_the_tokens_of_very_many_streams_leave_others_a_turn_between(monkeypatch: pytest.MonkeyPatch) -> None:
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
            counts.append(sum(stream._position for stream in streams))
            has_ended.append(streams[0].ended.done())
            await asyncio.sleep(0)
        return counts, has_ended

    assert run_async(scenario()) == ([2, 4, 5], [False, False, True])


def test_a_worker_whose_tokens_wait_for_their_turn_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: where all turns together took longer than `stall_s`, a worker that had said much was taken for lost."""
    monkeypatch.setattr(reader_module, "STREAMS_AT_ONCE_MAX", 4)
    monkeypatch.setattr(reader_module, "STREAMS_A_TURN_MAX", 2)

    async def scenario() -> list[bool]:
        worker, now = BareWorker(slots=5, config=WorkerSessionConfig(stall_s=1.0)), asyncio.get_running_loop().time()
        worker.session._clock = lambda: now
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


def test_what_comes_meanwhile_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
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
