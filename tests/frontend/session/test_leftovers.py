"""Leftovers: records at workers whose sessions were lost are discarded at once, or when there is a session again."""

from services.frontend.session.leftovers import LEFTOVERS_KEPT, Leftovers
from tests.frontend.support import BareWorker
from tests.support.clock import run_clocked, settle

ID, OTHER_ID = bytes(16), bytes(range(16))


async def discarded(worker: BareWorker) -> list[tuple[bytes, int, int]]:
    """What the worker was told to hand over and to cancel."""
    await settle()
    if not worker.has_sent:
        return []
    sent = await worker.sent()
    assert list(sent.cancels) == [adopt.stream_id for adopt in sent.adopts]
    return [(adopt.generation_id, adopt.index, adopt.epoch) for adopt in sent.adopts]


def test_record_is_discarded_at_once_where_there_is_a_session() -> None:
    async def scenario() -> None:
        leftovers, worker, other = Leftovers(), BareWorker("a"), BareWorker("b")
        leftovers.on_session("a", worker.session.generations)
        leftovers.on_session("b", other.session.generations)

        leftovers.discard("a", ID, 3, 7)

        assert await discarded(worker) == [(ID, 3, 7)]
        assert await discarded(other) == []

    run_clocked(scenario())


def test_records_wait_for_the_next_session_to_their_own_worker_and_are_discarded_once() -> None:
    async def scenario() -> None:
        leftovers, workers = Leftovers(), [BareWorker(name) for name in "abab"]
        leftovers.discard("a", ID, 3, 7)
        leftovers.discard("a", OTHER_ID, 0, 9)
        got = []
        for worker in workers:
            name = worker.session.record.instance_id
            leftovers.on_session(name, worker.session.generations)
            leftovers.on_lost(name)
            got.append(await discarded(worker))

        assert got == [[(ID, 3, 7), (OTHER_ID, 0, 9)], [], [], []]

    run_clocked(scenario())


def test_after_a_loss_records_wait_again() -> None:
    async def scenario() -> None:
        leftovers, first, second = Leftovers(), BareWorker("a"), BareWorker("a")
        leftovers.on_session("a", first.session.generations)
        leftovers.on_lost("a")
        leftovers.discard("a", ID, 3, 7)
        assert await discarded(first) == []

        leftovers.on_session("a", second.session.generations)

        assert await discarded(second) == [(ID, 3, 7)]

    run_clocked(scenario())


def test_number_of_records_that_wait_is_bounded_and_the_oldest_are_forgotten() -> None:
    async def scenario() -> list[int]:
        leftovers, worker = Leftovers(), BareWorker("a")
        for index in range(LEFTOVERS_KEPT + 2):
            leftovers.discard("a", ID, index, 7)
        leftovers.on_session("a", worker.session.generations)
        return [index for _, index, _ in await discarded(worker)]

    assert run_clocked(scenario()) == list(range(2, LEFTOVERS_KEPT + 2))
