"""Transport: carries a request on the session that Route chose, and closes its stream however the request ends."""

import asyncio
from typing import Any

import pytest

from services.core.call import Cause, Ending
from services.core.errors import Failure, Reason
from services.core.generation.kept import Generation, Kept
from services.core.request import FinishReason
from services.frontend.layers.transport import Transport
from services.stubs import worker_pb2
from tests.frontend.support import BareWorker
from tests.support.doubles import Collected, call_layer, make_request, run_async


async def carry(worker: BareWorker) -> Collected:
    return await call_layer(Transport(), make_request(), session=worker.session)


def test_tokens_and_the_finish_of_the_worker_reach_the_caller() -> None:
    async def scenario() -> Collected:
        worker = BareWorker()
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(carry(worker))
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
            asking = group.create_task(carry(worker))
            (submit,) = (await worker.sent()).submits
            asking.cancel()
        assert list((await worker.sent()).cancels) == [submit.stream_id]
        assert worker.candidate.in_flight_count == 0

    run_async(scenario())


async def left(cause: Cause | None = None, **fields: Any) -> worker_pb2.FrontendMessage:
    """What the worker is sent when a request whose answer is kept is cancelled. `cause`: of its ending."""
    worker, ending = BareWorker(), Ending()
    kept = Kept(generation=Generation(bytes(16), 30.0, is_told=fields.pop("is_told", True)), **fields)
    call = call_layer(Transport(), make_request(), session=worker.session, kept=kept, ending=ending)
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(call)
        await worker.sent()
        if cause is not None:
            ending.fail(Failure(Reason.CANCELLED, ""), cause)
        asking.cancel()
    assert worker.candidate.in_flight_count == 0
    return await worker.sent()


@pytest.mark.parametrize("cause", [None, Cause.CLIENT_DISCONNECT, Cause.SLOW_CLIENT, Cause.DRAIN])
def test_answer_whose_client_is_gone_is_left_to_other_frontends(cause: Cause | None) -> None:
    sent = run_async(left(cause))

    assert (list(sent.detaches), list(sent.cancels)) == ([1], [])


@pytest.mark.parametrize(("cause", "is_told"), [(Cause.EXPLICIT, True), (Cause.CLIENT_DISCONNECT, False)])
def test_answer_that_nobody_can_come_back_for_is_cancelled(cause: Cause, is_told: bool) -> None:
    sent = run_async(left(cause, is_told=is_told))

    assert (list(sent.detaches), list(sent.cancels)) == ([], [1])


def test_engine_of_an_answer_that_a_stop_string_has_ended_is_stopped() -> None:
    sent = run_async(left(is_stopped=lambda: True))

    assert (list(sent.stops), list(sent.detaches), list(sent.cancels)) == ([1], [], [])


def test_a_session_that_is_lost_before_the_request_is_sent_cannot_be_connected() -> None:
    async def scenario() -> Failure:
        worker = BareWorker()
        worker.vanish()
        with pytest.raises(Failure) as caught:
            await carry(worker)
        return caught.value

    assert run_async(scenario()).reason is Reason.CANNOT_CONNECT


def test_a_call_without_a_session_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="Route sets the session"):
        run_async(call_layer(Transport(), make_request()))
