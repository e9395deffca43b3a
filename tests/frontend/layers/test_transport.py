"""Transport: carries a request on the session that Route chose, and settles its stream however the request ends."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from services.core.call import Attempt, Call, Cause
from services.core.errors import Failure, Reason
from services.core.generation.kept import Copy, Generation, Kept
from services.core.request import FinishReason
from services.frontend.layers import transport
from services.frontend.layers.transport import Transport
from services.frontend.session.session import WorkerSession
from services.stubs import worker_pb2
from tests.frontend.support import BareWorker
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import CARD, Collected, call_layer, make_request, run_async
from tests.support.tables import rows_of


async def carry_plainly(worker: BareWorker) -> Collected:
    return await call_layer(Transport(), make_request(), session=worker.session)


def test_tokens_and_the_finish_of_the_worker_reach_the_caller() -> None:
    async def scenario() -> Collected:
        worker = BareWorker()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(carry_plainly(worker))
            (submit,) = (await worker.sent()).submits
            worker.tokens(submit.stream_id, 0, 7, 8)
            worker.finish(submit.stream_id)
        assert worker.candidate.in_flight_count == 0
        assert worker.cancels.signals == 0
        return asking.result()

    result = run_async(scenario())

    assert result.token_ids == [7, 8]
    assert result.finish is not None
    assert result.finish.reason is FinishReason.STOP


def test_a_cancelled_request_is_cancelled_on_the_worker() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(carry_plainly(worker))
            (submit,) = (await worker.sent()).submits
            asking.cancel()
        assert list((await worker.sent()).cancels) == [submit.stream_id]
        assert worker.candidate.in_flight_count == 0

    run_async(scenario())


def test_a_session_that_is_lost_before_the_request_is_sent_cannot_be_connected() -> None:
    async def scenario() -> Failure:
        worker = BareWorker()
        worker.vanish()
        with pytest.raises(Failure) as caught:
            await carry_plainly(worker)
        return caught.value

    assert run_async(scenario()).reason is Reason.CANNOT_CONNECT


def test_a_call_without_a_session_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="Route sets the session"):
        run_async(call_layer(Transport(), make_request()))


# Answers that are kept: what becomes of the stream is in the table of `_settle`.


COPY = Copy(session="i#1", token_count=0, is_over=False, discard=lambda: None)


class ReplacedAttempt(Attempt):
    """An attempt whose place another one has taken."""

    @property
    def is_needed(self) -> bool:
        return False


@dataclass
class Carried:
    """A request on its way over a session."""

    worker: BareWorker
    call: Call
    generation: Generation
    task: asyncio.Task[object]
    stream_id: int
    sink: Collected
    again: BareWorker | None = None

    async def told(self) -> worker_pb2.FrontendMessage:
        """What the worker was told since."""
        await settle()
        return await self.worker.sent() if self.worker.has_sent else worker_pb2.FrontendMessage()


@dataclass
class Given:
    """How a request is carried."""

    is_told: bool = True
    is_stopped: bool = False
    deadline: float | None = None
    attempt: type[Attempt] = Attempt
    adopts: bool = False
    early_s: float = 0.0


async def carry(given: Given) -> Carried:
    worker = BareWorker()
    generation = Generation(bytes(16), 30.0, is_told=given.is_told)
    attempt = given.attempt(worker.session)
    attempt.adopts = COPY if given.adopts else None
    kept = Kept(generation=generation, is_stopped=lambda: given.is_stopped, early_s=given.early_s)
    call = Call(request_id="r", card=CARD, attempt=attempt, deadline=given.deadline, kept=kept)
    sink = Collected()
    task = asyncio.ensure_future(Transport()(make_request(), call, sink))
    await settle()
    sent = await worker.sent()
    stream_id = (sent.adopts if given.adopts else sent.submits)[0].stream_id
    return Carried(worker, call, generation, task, stream_id, sink)


async def leave(carried: Carried) -> None:
    carried.task.cancel()
    await settle()


async def ends_well(carried: Carried) -> None:
    carried.worker.finish(carried.stream_id)
    await settle()


async def fails(carried: Carried) -> None:
    carried.worker.refuse(carried.stream_id, reason=Reason.ENGINE_ERROR)
    await settle()


async def fails_here(carried: Carried) -> None:
    """A bug: its worker went on, and kept a record that had an owner."""
    carried.worker.session._streams._open[carried.stream_id].fail(Failure(Reason.INTERNAL, "a bug in a sink"))
    await settle()


async def is_lost(carried: Carried) -> None:
    """The session is lost, the answer goes on elsewhere, and there is a session again."""
    carried.worker.vanish()
    await settle()
    carried.generation.drop_others(0)
    carried.again = BareWorker()
    carried.worker.session.leftovers.on_session("i", carried.again.session.generations)


async def is_cancelled_by_id(carried: Carried) -> None:
    carried.call.ending.fail(Failure(Reason.CANCELLED, "by id"), Cause.EXPLICIT)
    await leave(carried)


async def is_cancelled_by_id_as_it_ends(carried: Carried) -> None:
    """A bug: its record stayed with the worker, owned by this session, for as long as that lasted."""
    carried.call.ending.fail(Failure(Reason.CANCELLED, "by id"), Cause.EXPLICIT)
    carried.task.cancel()
    await ends_well(carried)


async def fails_elsewhere(carried: Carried) -> None:
    carried.generation.has_failed = True
    await leave(carried)


async def is_past_its_deadline(carried: Carried) -> None:
    pass_time(10)
    await leave(carried)


async def is_drained(carried: Carried) -> None:
    carried.call.ending.fail(Failure(Reason.DRAINING, "left"), Cause.DRAIN)
    await leave(carried)


async def reads_too_slowly(carried: Carried) -> None:
    carried.call.ending.fail(Failure(Reason.SLOW_CLIENT, "slow"), Cause.SLOW_CLIENT)
    await leave(carried)


HELD, NOTHING, CANCELLED = "its record is held until the whole answer is over", "nothing", "it is cancelled"
DISCARDED = "its record is discarded, once there is a session"
STOPPED, LET_GO = "its engine stops, and its record is held", "it is let go of"
ROWS: list[tuple[str, str, Given, Callable[[Carried], Awaitable[None]], str]] = [
    ("has ended well", "–", Given(), ends_well, HELD),
    ("has failed at the worker", "–", Given(), fails, NOTHING),
    ("has failed at this end", "–", Given(), fails_here, CANCELLED),
    ("was lost with its session", "goes on elsewhere", Given(), is_lost, DISCARDED),
    ("was lost with its session", "goes on elsewhere", Given(attempt=ReplacedAttempt), is_lost, DISCARDED),
    ("runs", "has its answer from another attempt", Given(attempt=ReplacedAttempt), leave, CANCELLED),
    ("runs", "is cancelled by its id, has failed, or is past its deadline", Given(), is_cancelled_by_id, CANCELLED),
    (
        "runs",
        "is cancelled by its id, has failed, or is past its deadline",
        Given(),
        is_cancelled_by_id_as_it_ends,
        CANCELLED,
    ),
    ("runs", "is cancelled by its id, has failed, or is past its deadline", Given(), fails_elsewhere, CANCELLED),
    (
        "runs",
        "is cancelled by its id, has failed, or is past its deadline",
        Given(deadline=10.0),
        is_past_its_deadline,
        CANCELLED,
    ),
    (
        "runs",
        "is cancelled by its id, has failed, or is past its deadline",
        Given(deadline=10.5, early_s=1.0),
        is_past_its_deadline,
        CANCELLED,
    ),
    ("runs", "has an id that its client was never told", Given(is_told=False), leave, CANCELLED),
    ("runs", "was ended by a stop string", Given(is_stopped=True), leave, STOPPED),
    ("runs", "has lost its client, or this process ends", Given(), leave, LET_GO),
    ("runs", "has lost its client, or this process ends", Given(deadline=10.0), leave, LET_GO),
    ("runs", "has lost its client, or this process ends", Given(), is_drained, LET_GO),
    ("runs", "has lost its client, or this process ends", Given(), reads_too_slowly, LET_GO),
]


async def observed(carried: Carried) -> str:
    """What has happened to the stream, in the words of the table."""
    told = await carried.told()
    carried.generation.release()
    released = await carried.told()
    assert carried.worker.candidate.in_flight_count == 0, "the stream is closed at this end"
    mine = [carried.stream_id]
    if carried.again is not None:
        sent = await carried.again.sent()
        (adopt,) = sent.adopts
        assert list(sent.cancels) == [adopt.stream_id]
        assert (adopt.generation_id, adopt.index, adopt.epoch) == (bytes(16), 0, carried.generation.epoch + 1)
        return DISCARDED
    match (list(told.cancels), list(told.stops), list(told.detaches), list(released.detaches)):
        case ([], [], [], []):
            return NOTHING
        case ([], [], [], held) if held == mine:
            return HELD
        case (cancels, [], [], []) if cancels == mine:
            return CANCELLED
        case ([], stops, [], held) if stops == held == mine:
            return STOPPED
        case ([], [], detaches, []) if detaches == mine:
            return LET_GO
    raise AssertionError(f"{told} {released}")


@pytest.mark.parametrize("adopts", [False, True], ids=["submitted", "adopted"])
@pytest.mark.parametrize(("stream", "request_", "given", "how", "happens"), ROWS)
def test_each_row_of_the_table_is_what_happens(
    stream: str,
    request_: str,
    given: Given,
    how: Callable[[Carried], Awaitable[None]],
    happens: str,
    adopts: bool,
) -> None:
    """A bug: a stream whose request was cancelled while it ran was taken for one that had ended."""
    given = replace(given, adopts=adopts)

    async def scenario() -> str:
        carried = await carry(given)
        await how(carried)
        assert carried.task.done()
        if not carried.task.cancelled():
            carried.task.exception()
        return await observed(carried)

    assert run_clocked(scenario()) == happens


def test_the_table_has_these_rows() -> None:
    rows = [(stream, request_, happens.partition(":")[0]) for stream, request_, happens in rows_of(transport._settle)]

    assert rows == list(dict.fromkeys((stream, request_, happens) for stream, request_, _, _, happens in ROWS))


@pytest.mark.parametrize("is_stopped", [False, True])
def test_session_that_is_lost_is_told_nothing(is_stopped: bool) -> None:
    async def scenario() -> None:
        carried = await carry(Given(is_stopped=is_stopped))
        carried.worker.vanish()
        await settle()
        assert carried.task.exception() is not None
        carried.generation.release()
        assert not carried.worker.has_sent

    run_clocked(scenario())


def test_record_of_a_lost_worker_is_left_there_while_the_answer_goes_on_nowhere_else() -> None:
    """Its client may come back for it."""

    async def scenario() -> None:
        carried, again = await carry(Given()), BareWorker()
        carried.worker.vanish()
        await settle()
        carried.worker.session.leftovers.on_session("i", again.session.generations)
        await settle()
        assert not again.has_sent
        assert carried.task.exception() is not None

    run_clocked(scenario())


def test_request_that_returns_to_a_lost_worker_does_not_discard_its_own_record() -> None:
    async def scenario() -> None:
        carried, again = await carry(Given()), BareWorker()
        carried.worker.vanish()
        await settle()
        assert carried.task.exception() is not None
        carried.worker.session.leftovers.on_session("i", again.session.generations)
        call = Call(request_id="r", card=CARD, attempt=Attempt(again.session), kept=carried.call.kept)
        returned = asyncio.ensure_future(Transport()(make_request(), call, Collected()))
        await again.sent()
        carried.generation.drop_others(0)
        await settle()
        assert not again.has_sent
        returned.cancel()

    run_clocked(scenario())


def test_record_that_is_held_can_be_let_go_of_after_its_session_was_lost() -> None:
    async def scenario() -> None:
        carried = await carry(Given())
        await ends_well(carried)
        carried.worker.vanish()
        carried.generation.release()
        assert not carried.worker.has_sent

    run_clocked(scenario())


def test_adopted_request_is_not_submitted() -> None:
    async def scenario() -> None:
        carried = await carry(Given(adopts=True))
        carried.worker.begin(carried.stream_id)
        carried.worker.tokens(carried.stream_id, 0, 7, 8)
        await ends_well(carried)
        assert carried.sink.token_ids == [7, 8]
        assert carried.call.attempt.has_begun
        assert isinstance(carried.call.attempt.session, WorkerSession)

    run_clocked(scenario())
