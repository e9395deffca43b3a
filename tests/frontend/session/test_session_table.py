"""The table in the docstring of `session.py` says how each event ends the session and its streams."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from services.core.call import Attempt, Call
from services.core.errors import Failure, Reason
from services.core.generation.kept import Copy
from services.discovery.client import InstanceRecord
from services.frontend.session import session as module
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.frontend.session.stream_table import ADOPTION_S_MAX, COMPLETION_S_MAX
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from services.tls.roles import Role
from tests.frontend.session.support import (
    PATIENT,
    QUICK,
    WELCOME,
    Client,
    Peer,
    Serve,
    attach,
    failure_of,
    nothing,
    play,
    playing,
)
from tests.support.doubles import Collected, make_kept, make_request, run_async
from tests.support.raw_session import frame, serve_connections
from tests.tls.support import peers_of, shared_certificates

Outcome = tuple[list[Reason | None], Reason | None]
"""What each stream and the session failed with. None: it did not fail."""
PLAYS: dict[str, Callable[[], Outcome]] = {}
"""Event → a play that has it."""


def rows_of_table() -> list[list[str]]:
    lines = [line for line in (module.__doc__ or "").splitlines() if line.startswith("|") and "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][1:]


def expected(streams: str, session: str) -> Outcome:
    """The outcome that two cells describe."""
    reasons: list[Reason | None] = [] if streams == "–" else [Reason(streams.partition(",")[0])]
    if streams.endswith("that stream alone"):
        reasons.append(None)
    return reasons, None if session == "–" else Reason(session)


def test_every_event_in_the_table_has_a_play_and_every_play_an_event() -> None:
    assert [event for event, _, _ in rows_of_table()] == list(PLAYS)


@pytest.mark.parametrize(("event", "streams", "session"), rows_of_table())
def test_event_ends_the_session_and_its_streams_as_the_table_says(event: str, streams: str, session: str) -> None:
    assert PLAYS[event]() == expected(streams, session)


def on(event: str) -> Callable[[Callable[[], Outcome]], Callable[[], Outcome]]:
    """Register the play of an event."""

    def register(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        PLAYS[event] = run
        return run

    return register


def outcome(
    serve: Serve, *, config: WorkerSessionConfig = PATIENT, has_stream: bool = True, later_s: float = 0.0
) -> Outcome:
    """Play a session with one stream, which has a token before the event, or with none.

    `later_s`: how much time the session is told that passes before the event.
    """
    reasons: list[Reason | None] = []

    async def use(client: Client) -> None:
        stream, collected = client.open()
        while not collected.token_ids:
            await asyncio.sleep(0)
        client.later_s = later_s
        reasons.append(await failure_of(stream))
        assert collected.token_ids == [7]

    failure = play(serve, use if has_stream else nothing, config)
    return reasons, failure.reason


async def begin(peer: Peer) -> int:
    """Welcome the frontend and send a token of its stream. Returns the id of the stream."""
    await peer.welcome()
    stream_id = (await peer.read()).submits[0].stream_id
    await peer.tokens((stream_id, 0, [7]))
    return stream_id


@on("the worker cannot be reached")
def cannot_be_reached() -> Outcome:
    return [], run_async(attach("127.0.0.1:1", nothing, QUICK)).reason


@on("no welcome comes within `connect_timeout_s`")
def no_welcome_in_time() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.raw.read()

    return outcome(serve, config=replace(QUICK, idle_stall_s=60), has_stream=False)


@on("the connection ends before a welcome")
def ends_before_a_welcome() -> Outcome:
    async def serve(_: Peer) -> None:
        """Hang up."""

    return outcome(serve, has_stream=False)


@on("the handshake of TLS fails, or the peer has not the role of a worker")
def handshake_fails() -> Outcome:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"no TLS")
        await reader.read()

    async def scenario() -> Failure:
        async with serve_connections(greet) as address:
            return await attach(address, nothing, PATIENT, peers_of(shared_certificates(), Role.FRONTEND))

    return [], run_async(scenario()).reason


@on("the first message is no welcome")
def first_message_is_no_welcome() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.send(load=worker_pb2.Load())
        await peer.raw.read()

    return outcome(serve, has_stream=False)


@on("the first message is a refusal")
def first_message_is_a_refusal() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.send(refusal="you are no frontend")
        await peer.raw.read()

    return outcome(serve, has_stream=False)


@on("the welcome is another worker's")
def welcome_of_another() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.send(welcome=worker_pb2.Welcome(instance_id="j", card=WELCOME.card))
        await peer.raw.read()

    return outcome(serve, has_stream=False)


@on("the connection ends")
def connection_ends() -> Outcome:
    async def serve(peer: Peer) -> None:
        await begin(peer)

    async def break_off(peer: Peer) -> None:
        await begin(peer)
        peer.raw.abort()

    closed, aborted = outcome(serve), outcome(break_off)
    assert closed == aborted
    return closed


@on("the connection ends after a goaway")
def ends_after_a_goaway() -> Outcome:
    async def serve(peer: Peer) -> None:
        await begin(peer)
        await peer.send(goaway=worker_pb2.GoAway())

    return outcome(serve)


@on("the connection ends after a goaway, without streams")
def ends_after_a_goaway_without_streams() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(goaway=worker_pb2.GoAway())

    return outcome(serve, has_stream=False)


@on("no stream is left after a goaway: the frontend hangs up")
def no_stream_is_left_after_a_goaway() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.send(goaway=worker_pb2.GoAway())
        await peer.raw.until_over()

    return outcome(serve, has_stream=False)


@on("the worker exceeds a limit of `liveness.py`")
def exceeds_a_limit() -> Outcome:
    async def serve(peer: Peer) -> None:
        await begin(peer)
        await peer.raw.until_over()

    return outcome(serve, later_s=2 * PATIENT.stall_s)


@on("a message cannot be decoded")
def message_cannot_be_decoded() -> Outcome:
    async def serve(peer: Peer) -> None:
        await begin(peer)
        peer.raw.send_raw(frame(b"\xff\xff\xff\xff"))
        await peer.raw.read()

    return outcome(serve)


@on("the columns of a step have unequal lengths")
def columns_of_unequal_length() -> Outcome:
    async def serve(peer: Peer) -> None:
        stream_id = await begin(peer)
        step = worker_pb2.Step(stream_ids=[stream_id], positions=[1], token_counts=[2], token_ids=[8])
        await peer.send(step=step)
        await peer.raw.read()

    return outcome(serve)


@on("an item follows the `complete_final` of its stream")
def item_follows_complete_final() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        completed, running = (submit.stream_id for submit in (await peer.read()).submits)
        await peer.finish(completed)
        await peer.tokens((completed, 0, [8]))
        await peer.finish(running)
        await peer.raw.read()

    reasons: list[Reason | None] = []

    async def use(client: Client) -> None:
        (completed, _), (running, _) = client.open(), client.open()
        await completed.ended
        reasons.append(await failure_of(running))

    return reasons, play(serve, use).reason


@on("an item breaks the rules of one stream")
def item_breaks_the_rules_of_one_stream() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        bad, good = (submit.stream_id for submit in (await peer.read()).submits)
        await peer.tokens((bad, 5, [7]), (good, 0, [8]))
        assert (await peer.read()).cancels == [bad]
        await peer.finish(good)
        await peer.raw.read()

    found: list[Outcome] = []

    async def use(client: Client) -> None:
        (bad, _), (good, collected) = client.open(), client.open()
        reasons = [await failure_of(bad), await reason_of(good)]
        assert collected.token_ids == [8]
        found.append((reasons, client.lost.reason if client.lost else None))
        client.session.lose(Failure(Reason.DISCONNECTED, "end of the play"))

    play(serve, use)
    return found[0]


@on("no `complete_final` follows a finish reason within `COMPLETION_S_MAX`")
def no_complete_final_follows() -> Outcome:
    async def serve(peer: Peer) -> None:
        stream_id = await begin(peer)
        await peer.send(ends=[worker_pb2.StreamEnd(stream_id=stream_id, finish_reason=FINISH_REASON_STOP)])
        assert (await peer.read()).cancels == [stream_id]
        await peer.raw.until_over()

    found: list[Outcome] = []

    async def use(client: Client) -> None:
        stream, collected = client.open()
        client.later_s = COMPLETION_S_MAX
        reason = await reason_of(stream)
        assert collected.token_ids == [7]
        found.append(([] if reason is None else [reason], client.lost.reason if client.lost else None))
        client.session.lose(Failure(Reason.DISCONNECTED, "end of the play"))

    play(serve, use)
    return found[0]


@on("what the worker said to have of an adopted stream does not come")
def adopted_stream_does_not_come() -> Outcome:
    async def serve(peer: Peer) -> None:
        await peer.welcome()
        asked = await peer.read()
        await peer.tokens((asked.submits[0].stream_id, 0, [7]))
        await peer.send(begun=[asked.adopts[0].stream_id])
        while not (heard := await peer.read()).cancels:
            assert heard == worker_pb2.FrontendMessage(), "only keepalives come before"
        assert heard.cancels == [asked.adopts[0].stream_id]
        await peer.finish(asked.submits[0].stream_id)
        await peer.raw.read()

    found: list[Outcome] = []

    async def use(client: Client) -> None:
        attempt, kept = Attempt(), make_kept()
        attempt.adopts = Copy(session="i#1", token_count=1, is_over=False, discard=lambda: None)
        good, _ = client.open()
        bad = client.session.adopt(make_request(), Call(request_id="r", attempt=attempt, kept=kept), Collected())
        client.later_s = ADOPTION_S_MAX
        reasons = [await failure_of(bad), await reason_of(good)]
        found.append((reasons, client.lost.reason if client.lost else None))
        client.session.lose(Failure(Reason.DISCONNECTED, "end of the play"))

    play(serve, use)
    return found[0]


@on("the frontend closes the session")
def frontend_closes_the_session() -> Outcome:
    """A bug: the streams hung for ever, because the loss was a future that the cancellation cancelled."""

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        await peer.raw.until_over()

    async def scenario() -> Outcome:
        async with playing(serve) as address:
            session, welcome = WorkerSession(InstanceRecord("i", address, "m"), WorkerSessionConfig()), asyncio.Event()
            running = asyncio.ensure_future(session.run(welcome))
            await welcome.wait()
            stream = session.open(make_request(), Call(request_id="r"), Collected())
            running.cancel()
            await asyncio.wait([running])
            assert session._loss is not None
            return [await failure_of(stream)], session._loss.reason

    return run_async(scenario())


async def reason_of(stream: Stream) -> Reason | None:
    """What the stream failed with; None if it ended well."""
    try:
        await stream.ended
    except Failure as failure:
        return failure.reason
    return None
