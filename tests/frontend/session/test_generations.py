"""Questions to a worker about answers: each gets its own reply, or none once the session is lost."""

import asyncio

import pytest

from services.stubs import worker_pb2
from tests.frontend.support import BareWorker
from tests.support.clock import run_clocked, settle

ID = bytes(range(16))


def locate(worker: BareWorker, generation_id: bytes = ID) -> asyncio.Future[worker_pb2.Located | None]:
    return worker.session.generations.locate(generation_id)


def test_replies_reach_those_who_asked_in_any_order() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        asking = [locate(worker), locate(worker, bytes(16))]
        await settle()
        first, second = (await worker.sent()).locates
        assert (first.generation_id, second.generation_id) == (ID, bytes(16))

        worker.hear(
            located=[
                worker_pb2.Located(query=second.query, presentation=b"second"),
                worker_pb2.Located(query=first.query, presentation=b"first"),
            ]
        )

        replies = [await one for one in asking]
        assert [one and one.presentation for one in replies] == [b"first", b"second"]

    run_clocked(scenario())


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["no longer waits", "never asked"])
def test_reply_that_nobody_waits_for_is_ignored(is_cancelled: bool) -> None:
    async def scenario() -> None:
        worker = BareWorker()
        query = 99
        if is_cancelled:
            asking = locate(worker)
            await settle()
            query = (await worker.sent()).locates[0].query
            asking.cancel()
            await settle()

        worker.hear(located=[worker_pb2.Located(query=query)])

        assert not worker.session.is_lost

    run_clocked(scenario())


def test_second_reply_to_a_question_is_ignored() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        asking = locate(worker)
        await settle()
        query = (await worker.sent()).locates[0].query

        worker.hear(located=[worker_pb2.Located(query=query), worker_pb2.Located(query=query, is_expired=True)])

        located = await asking
        assert located is not None
        assert not located.is_expired
        assert not worker.session.is_lost

    run_clocked(scenario())


def test_lost_session_ends_its_questions_without_a_reply() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        asking = [locate(worker), locate(worker)]
        await settle()

        worker.vanish()

        assert [await one for one in asking] == [None, None]

    run_clocked(scenario())


def test_question_on_a_lost_session_has_no_reply_at_once() -> None:
    """A bug: a resume waited for a session that was lost in the same turn of the loop, as long as for a slow worker."""

    async def scenario() -> None:
        worker = BareWorker()
        worker.vanish()

        asking = locate(worker)
        await settle()

        assert asking.done()
        assert asking.result() is None

    run_clocked(scenario())


def test_question_that_cancels_says_so() -> None:
    async def scenario() -> None:
        worker = BareWorker()
        asking = worker.session.generations.locate(ID, cancels=True)
        await settle()

        (sent,) = (await worker.sent()).locates

        assert sent.cancels
        asking.cancel()

    run_clocked(scenario())
