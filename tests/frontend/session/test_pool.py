"""Pool: discovery says which workers exist, only a session proves that a worker lives."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.common_layers import Deadline
from services.core.errors import Failure, Reason, RefusedFor
from services.core.interface import Delta
from services.core.model_card import ModelCard, TokenizerRef
from services.discovery.client import InstanceRecord
from services.frontend.layers.transport import Transport
from services.frontend.model_catalog import ModelCatalog
from services.frontend.session.pool import Pool, PoolConfig
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.writer import KEEPALIVE_S
from services.rpc.codec import card_to_wire
from services.rpc.framing import PREAMBLE, FrameConnection
from services.runtime.backoff import Backoff
from services.stubs import worker_pb2, worker_pb2_grpc
from services.worker.dispatcher import Limits
from services.worker.engines.mocker import MockerConfig, MockerEngine
from services.worker.execute import Execute
from services.worker.listener import SessionListener
from services.worker.service import WorkerService
from services.worker.session import SILENCE_S_MAX, FrontendSessionConfig
from tests.frontend.support import BareWorker
from tests.http.rpcs import serving_at
from tests.support.clock import WAIT_S, pass_time, run_clocked, settle
from tests.support.doubles import CARD, Collected, call_layer, make_request, run_async
from tests.support.manual_worker import session_count
from tests.support.raw_session import RawSession, RecordingTransport, serve_raw_sessions

QUICK = PoolConfig(
    reconnect=Backoff(base_s=0.01, cap_s=0.05),
    session=WorkerSessionConfig(connect_timeout_s=0.5, stall_s=1.0),
)


class Machine:
    """A real worker in this process, on its own port."""

    def __init__(self, name: str, card: Callable[[ModelCard], ModelCard] = lambda card: card, **config: Any) -> None:
        engine = MockerEngine(MockerConfig(itl_ms=1))
        engine.card = card(engine.card)
        self.engine = engine
        self.execute = Execute(engine, Limits(slots=4, places=0))
        self.service = WorkerService(
            name, engine, self.execute, Deadline(self.execute), FrontendSessionConfig(**config)
        )
        self.record = InstanceRecord(name, "", engine.card.model)

    @asynccontextmanager
    async def running(self, listen: str = "127.0.0.1:0") -> AsyncIterator["Machine"]:
        async with (
            serving_at((worker_pb2_grpc.add_WorkerServicer_to_server, self.service)) as address,
            SessionListener(self.service.attach) as listener,
            asyncio.TaskGroup() as group,
        ):
            engine = group.create_task(self.engine.run(self.execute.emit, asyncio.Event()))
            self.record = replace(self.record, address=address, session_address=await listener.start(listen))
            try:
                yield self
            finally:
                engine.cancel()


@asynccontextmanager
async def pool_of(
    view: Mapping[str, InstanceRecord], catalog: ModelCatalog | None = None, config: PoolConfig = QUICK
) -> AsyncIterator[Pool]:
    pool = Pool(catalog or ModelCatalog(), config)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(pool.run())
        pool.on_change(view, ())
        try:
            yield pool
        finally:
            running.cancel()


def view_of(*machines: Machine) -> dict[str, InstanceRecord]:
    return {machine.record.instance_id: machine.record for machine in machines}


async def until(pool: Pool, count: int) -> list[str]:
    """Wait until there are `count` sessions. Returns the ids of their instances."""
    while True:
        change = pool.next_change
        if len(found := sessions(pool)) == count:
            return sorted(session.record.instance_id for session in found)
        await change.wait()


def sessions(pool: Pool) -> list[WorkerSession]:
    found = [
        one for card in pool.served_cards() for one in pool.worker_set(card) if not (one.is_draining or one.is_lost)
    ]
    return [session for one in found if (session := pool.session(one.key)) is not None]


async def ask(pool: Pool, key: str) -> Collected:
    return await call_layer(Transport(), make_request(max_tokens=3), session=pool.session(key))


def test_the_pool_keeps_a_session_to_every_instance_of_the_view() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, Machine("b").running() as b, pool_of(view_of(a, b)) as pool:
            assert await until(pool, 2) == ["a", "b"]
            assert [card.model for card in pool.served_cards()] == ["mocker"]

    run_async(scenario())


def test_a_request_is_carried_on_the_chosen_session() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            assert len((await ask(pool, sessions(pool)[0].key)).token_ids) == 3

    run_async(scenario())


def test_a_worker_that_gets_a_request_is_lost_exactly_stall_s_later_if_it_is_silent() -> None:
    config = WorkerSessionConfig(stall_s=1.0, idle_stall_s=10)

    async def scenario() -> list[bool]:
        pool, was_lost = Pool(ModelCatalog(), PoolConfig(session=config)), []
        sweeping = asyncio.create_task(pool._sweep())
        await settle()
        worker = BareWorker(config=config)
        pool._welcomed[worker.session] = None
        for seconds in (0.5, 0.125, 0.125, 0.5, 0.25, 0.0625, 0.0625):  # It looks every quarter of a second.
            pass_time(seconds)
            await settle()
            if asyncio.get_running_loop().time() == 0.625:
                worker.open().ended.add_done_callback(lambda ended: ended.exception())
            was_lost.append(worker.session.is_lost)
        sweeping.cancel()
        return was_lost

    assert run_clocked(scenario()) == [False] * 6 + [True]


@pytest.mark.parametrize(
    ("spans_s", "is_lost"),
    [((0.25, 0.25, 0.25, 0.25), True), ((0.25, 0.25, 0.5), True), ((0.25, 0.75), False), ((0.25, 2.0), False)],
)
def test_a_late_frontend_does_not_take_its_workers_for_silent(spans_s: tuple[float, ...], is_lost: bool) -> None:
    """A bug: a frontend whose loop stood still from a heartbeat until `stall_s` later lost all its workers.

    `spans_s`: times between turns of the loop.
    """
    config = WorkerSessionConfig(stall_s=1.0)

    async def scenario() -> bool:
        pool, worker = Pool(ModelCatalog(), PoolConfig(session=config)), BareWorker(config=config)
        pool._welcomed[worker.session] = None
        worker.open().ended.add_done_callback(lambda ended: ended.exception())
        sweeping = asyncio.create_task(pool._sweep())
        await settle()
        for seconds in spans_s:
            pass_time(seconds)
            await settle()
        sweeping.cancel()
        return worker.session.is_lost

    assert run_clocked(scenario()) is is_lost


def found(config: WorkerSessionConfig | None = None) -> tuple[BareWorker, RecordingTransport]:
    """A worker, and the bytes that are sent to it."""
    worker, wire = BareWorker(config=config), RecordingTransport()
    connection: FrameConnection[worker_pb2.WorkerMessage] = FrameConnection(worker_pb2.WorkerMessage, is_opener=True)
    connection.connection_made(wire)
    worker.session._writer.connect(connection)
    return worker, wire


def test_a_worker_found_right_after_a_sweep_gets_a_keepalive_in_time_however_long_stall_s_is() -> None:
    """A bug: with a `stall_s` of a minute, a worker got nothing for half a minute, and hung up after 15 s."""
    config = WorkerSessionConfig(stall_s=60.0, idle_stall_s=60.0)

    async def scenario() -> float:
        pool = Pool(ModelCatalog(), PoolConfig(session=config))
        sweeping = asyncio.create_task(pool._sweep())
        await settle()
        worker, wire = found(config)
        pool._welcomed[worker.session] = None
        while wire.written == PREAMBLE:
            pass_time(1.0)
            await settle()
        sweeping.cancel()
        return asyncio.get_running_loop().time()

    assert run_clocked(scenario()) <= SILENCE_S_MAX - KEEPALIVE_S


class Looks(dict[WorkerSession, None]):
    """The sessions of a pool. It counts how often it is iterated."""

    count = 0

    def __iter__(self) -> Iterator[WorkerSession]:
        self.count += 1
        return super().__iter__()


def test_workers_found_one_by_one_are_checked_together() -> None:
    """A bug: all of 1,000 workers were checked whenever one was due for a keepalive, 140 times a second."""

    async def scenario() -> tuple[int, list[int]]:
        pool, wires = Pool(ModelCatalog(), PoolConfig()), []
        pool._welcomed = looks = Looks()
        for _ in range(50):
            worker, wire = found()
            pool._welcomed[worker.session] = None
            wires.append(wire)
            pass_time(0.01)
        sweeping = asyncio.create_task(pool._sweep())
        for _ in range(600):
            pass_time(0.01)
            await settle()
        sweeping.cancel()
        return looks.count, [len(wire.written) - len(PREAMBLE) for wire in wires]

    looks_count, heard_bytes = run_clocked(scenario())

    assert looks_count <= 6 * 4 + 1
    assert set(heard_bytes) == {4}, "an empty message is its length"


def test_an_instance_that_leaves_the_view_keeps_its_living_session() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, Machine("b").running() as b, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            pool.on_change(view_of(b), ["a"])
            assert await until(pool, 2) == ["a", "b"]

    run_async(scenario())


def test_an_instance_that_comes_back_into_the_view_gets_a_session_again() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, Machine("b").running() as b, pool_of(view_of(a, b)) as pool:
            await until(pool, 2)
            pool.on_change({}, ["a"])
            drop_sessions(a)
            assert await until(pool, 1) == ["b"]
            while "a" in pool._kept:
                await asyncio.sleep(0)
            assert pool._quarantined == {}, "nothing is kept of an instance that is gone"
            pool.on_change(view_of(a), ())
            assert await until(pool, 2) == ["a", "b"]

    run_async(scenario())


def test_a_worker_that_reports_its_load_after_a_refusal_is_looked_at_again() -> None:
    async def scenario() -> bool:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            [session] = sessions(pool)
            worker_set = pool.worker_set(session.card)
            session.candidate.on_refused(RefusedFor.CAPACITY, 1, 0)
            worker_set.leave_out(session.candidate)
            session.candidate.on_load(worker_pb2.Load(ranks=[worker_pb2.RankLoad()]))
            return session.candidate in worker_set.open

    assert run_async(scenario())


def test_a_worker_set_without_workers_is_kept_while_a_request_waits_in_it() -> None:
    async def scenario() -> list[bool]:
        pool, cards = Pool(ModelCatalog(), QUICK), [replace(CARD, model=name) for name in ("a", "b", "c")]
        worker_set, kept = pool.worker_set(cards[0]), []
        with worker_set.wait_queue.join():
            pool.worker_set(cards[1])
            kept.append(pool.worker_set(cards[0]) is worker_set)
        pool.worker_set(cards[2])
        return [*kept, pool.worker_set(cards[0]) is worker_set]

    assert run_async(scenario()) == [True, False]


def test_a_lost_session_is_gone_even_before_it_is_withdrawn() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            sessions(pool)[0].lose(Failure(Reason.STALLED, "silent"))
            assert sessions(pool) == []

    run_async(scenario())


def test_a_lost_worker_is_withdrawn_at_once_and_found_again_when_it_is_back() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            first = sessions(pool)[0].key
            drop_sessions(a)
            await until(pool, 0)
            await until(pool, 1)
            [found] = sessions(pool)
            assert found.key != first
            assert pool.session(first) is None
            assert [*pool._welcomed] == [found], "the lost session is not checked any more"
            assert found.candidate.quarantined_until > asyncio.get_running_loop().time()

    run_async(scenario())


def test_a_worker_that_leaves_is_hung_up_on_and_not_offered_again_while_it_is_still_registered() -> None:
    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            a.service.goaway(30.0)
            await a.service.end_sessions(2 * WAIT_S)  # Until the frontend has hung up.
            while sum(line["event"] == "session over" for line in logs) < 3:  # It tries again.
                await asyncio.sleep(0.01)
            assert not pool.all_sessions()

    with capture_logs() as logs:
        run_async(scenario())

    events = [line["event"] for line in logs]
    assert (events.count("worker found"), events.count("worker left")) == (1, 1)


def drop_sessions(machine: Machine) -> None:
    """Overfill the outboxes of the sessions, so that the worker ends them."""
    for session in machine.service._sessions:
        session._outbox.add_tokens(99, Delta(0, [1] * (FrontendSessionConfig().outbox_tokens_max + 1)))


def test_a_worker_whose_card_contradicts_that_of_other_workers_is_not_used() -> None:
    def other(card: ModelCard) -> ModelCard:
        return replace(card, context_length=7)

    async def scenario() -> None:
        async with Machine("a").running() as a, Machine("b", other).running() as b, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            pool.on_change(view_of(b), ())
            while not session_count(b.service):
                await asyncio.sleep(0.01)
            while session_count(b.service):
                await asyncio.sleep(0.01)
            assert await until(pool, 1) == ["a"]

    run_async(scenario())


def test_workers_of_one_model_may_have_different_limits_of_moves() -> None:
    """Bug: the limit was part of the card, so a worker with another one than the first was refused."""

    async def scenario() -> None:
        async with (
            Machine("a", migration_limit=2).running() as a,
            Machine("b", migration_limit=0).running() as b,
            Machine("c").running() as c,
            pool_of(view_of(a, b, c)) as pool,
        ):
            assert await until(pool, 3) == ["a", "b", "c"]
            assert len({id(session.card) for session in sessions(pool)}) == 1
            limits = {session.record.instance_id: session.migration_limit for session in sessions(pool)}
            assert limits == {"a": 2, "b": 0, "c": None}

    run_async(scenario())


def test_a_worker_whose_tokeniser_cannot_be_fetched_is_not_used() -> None:
    def missing(card: ModelCard) -> ModelCard:
        return replace(card, tokenizer=TokenizerRef("gguf", "0" * 64))

    async def scenario() -> None:
        async with Machine("a", missing).running() as a, pool_of(view_of(a)) as pool:
            while not session_count(a.service):
                await asyncio.sleep(0.01)
            while session_count(a.service):
                await asyncio.sleep(0.01)
            assert sessions(pool) == []
            while not any(line["event"] == "worker cannot be used" for line in logs):
                await asyncio.sleep(0.01)

    with capture_logs() as logs:
        run_async(scenario())


@pytest.mark.parametrize("is_met_before", [False, True])
def test_a_worker_that_cannot_be_used_is_logged_once_even_if_it_was_away_before(is_met_before: bool) -> None:
    def other(card: ModelCard) -> ModelCard:
        return replace(card, context_length=7)

    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a)) as pool:
            await until(pool, 1)
            async with Machine("b", other).running() as b:
                pool.on_change({"b": replace(b.record, session_address="127.0.0.1:1")} if is_met_before else {}, ())
                while is_met_before and not any(line["event"].startswith("worker not reached") for line in logs):
                    await asyncio.sleep(0.01)
                pool.on_change(view_of(b), ())
                while sum(line["event"] == "session over" for line in logs) < 3:  # It tries again and again.
                    await asyncio.sleep(0.01)

    with capture_logs() as logs:
        run_async(scenario())

    refusals = [line["why"] for line in logs if line["event"] == "worker cannot be used"]
    assert len(refusals) == 1
    assert "differs from that of the workers" in refusals[0]


class SlowCatalogue(ModelCatalog):
    """A catalogue that never learns a model."""

    async def learn(self, card: ModelCard, address: str, may_replace: Callable[[], bool]) -> ModelCard:
        await asyncio.Event().wait()
        raise AssertionError


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_session_is_kept_alive_and_checked_while_its_model_is_learned(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: the worker got nothing and hung up after 15 s, so a tokeniser that took longer was never fetched."""
    monkeypatch.setattr("services.frontend.session.writer.KEEPALIVE_S", 0.01)
    config = replace(QUICK, session=replace(QUICK.session, idle_stall_s=0.1 if is_silent else 60.0))

    async def scenario() -> worker_pb2.FrontendMessage | None:
        heard: asyncio.Future[worker_pb2.FrontendMessage | None] = asyncio.get_running_loop().create_future()

        async def serve(line: RawSession) -> None:
            await line.send(
                worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(instance_id="a", card=card_to_wire(CARD)))
            )
            message = await line.read()
            while is_silent and message is not None:
                message = await line.read()
            if not heard.done():
                heard.set_result(message)
            await line.until_over()

        async with (
            serve_raw_sessions(serve) as address,
            pool_of({"a": InstanceRecord("a", address, "m")}, SlowCatalogue(), config),
        ):
            return await heard

    assert run_async(scenario()) == (None if is_silent else worker_pb2.FrontendMessage(reads_logprob_columns=True))


def test_a_worker_that_is_lost_while_its_model_is_learned_is_not_one_that_cannot_be_used() -> None:
    """Bug: the log called it an error of the worker, as if its tokeniser could not be read."""

    async def scenario() -> None:
        async with Machine("a").running() as a, pool_of(view_of(a), SlowCatalogue()) as pool:
            while not pool._welcomed:
                await asyncio.sleep(0.01)
            drop_sessions(a)
            while not events():
                await asyncio.sleep(0.01)

    with capture_logs() as logs:

        def events() -> list[str]:
            return [line["event"] for line in logs if line["event"].startswith("worker ")]

        run_async(scenario())

    assert events() == ["worker lost"]


@pytest.mark.parametrize("remind_s", [60.0, 0.0], ids=["once", "repeatedly"])
def test_a_worker_that_was_never_reached_is_logged_from_time_to_time_with_the_address_that_was_tried(
    remind_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: the log called it lost, and showed its other address."""
    monkeypatch.setattr("services.runtime.log_throttle.REMIND_S", remind_s)

    async def scenario() -> None:
        tries = 0
        is_tried = asyncio.Event()

        async def serve(line: RawSession) -> None:
            nonlocal tries
            tries += 1
            if tries == 5:
                is_tried.set()

        async with (
            serve_raw_sessions(serve) as address,
            pool_of({"a": InstanceRecord("a", "x:1", "m", False, address)}),
        ):
            await is_tried.wait()
        assert {line["session_address"] for line in logs} == {address}

    with capture_logs() as logs:
        run_async(scenario())

    assert {line["event"] for line in logs} == {"worker not reached: trying again"}
    assert "--session-listen" in logs[0]["check"]
    assert (len(logs) > 1) is (remind_s == 0)


def test_the_pool_counts_registered_workers_that_are_not_reached_and_the_models_they_serve() -> None:
    async def scenario() -> None:
        catalog = ModelCatalog()
        async with Machine("a").running() as a, pool_of({}, catalog) as pool:
            pool.on_change({"x": InstanceRecord("x", "127.0.0.1:1", "old")}, ())
            pool.on_change({"x": InstanceRecord("x", "127.0.0.1:1", "new")}, ())
            pool.on_change(view_of(a), ())
            assert pool.unreached_count == 2
            await until(pool, 1)
            assert pool.unreached_count == 1
            assert [catalog.registered_count(name) for name in ("old", "new", "mocker")] == [0, 1, 1]
            pool.on_change({}, ["x", "a"])
            assert pool.unreached_count == 0
            assert not catalog.is_name("new")

    run_async(scenario())


def test_a_lost_worker_is_logged_as_still_away_until_it_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.log_throttle.REMIND_S", 0.0)

    async def scenario() -> None:
        async with pool_of({}) as pool:
            async with Machine("a").running() as a:
                pool.on_change(view_of(a), ())
                await until(pool, 1)
            while len(events()) < 3:
                await asyncio.sleep(0.01)

    with capture_logs() as logs:

        def events() -> list[str]:
            return [line["event"] for line in logs if line["event"].startswith("worker ")]

        run_async(scenario())

    assert events()[:3] == ["worker found", "worker lost", "worker still away: trying again"]


def test_the_pool_has_all_workers_once_requests_can_be_sent_to_each_that_discovery_names() -> None:
    async def scenario() -> None:
        async with Machine("one").running() as one, Machine("two").running() as two, pool_of({}) as pool:
            assert not pool.has_all, "discovery has named none yet"
            pool.on_change({machine.record.instance_id: machine.record for machine in (one, two)}, ())
            assert not pool.has_all
            while not pool.has_all:
                await pool.next_change.wait()

            assert len(pool.all_sessions()) == 2

    run_async(scenario())


async def wait_count(pool: Pool, expected: int) -> None:
    while pool.frontend_count() != expected or not pool.all_sessions():
        await asyncio.sleep(0.01)


def test_frontends_count_each_other_by_their_sessions() -> None:
    """Limits of tenants are shared by it."""

    async def scenario() -> None:
        async with (
            asyncio.timeout(WAIT_S),
            Machine("a").running() as machine,
            pool_of(view_of(machine)) as first,
        ):
            await wait_count(first, 1)
            async with pool_of(view_of(machine)) as second:
                await wait_count(second, 2)
                await wait_count(first, 2)
            await wait_count(first, 1)

    run_async(scenario())


def test_frontend_without_workers_is_the_only_one_that_it_knows() -> None:
    async def scenario() -> int:
        return Pool(ModelCatalog(), QUICK).frontend_count()

    assert run_async(scenario()) == 1
