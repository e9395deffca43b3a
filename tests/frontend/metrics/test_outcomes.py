"""Outcomes counts and logs the requests of one iteration of the event loop together, before a client can notice."""

import asyncio

from structlog.testing import capture_logs

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.interface import Finish, Usage
from services.core.request import FinishReason
from services.frontend.metrics.definitions import build_metrics
from services.frontend.metrics.outcomes import Outcome, Outcomes
from tests.support.doubles import run_async

ENDED = Finish(FinishReason.LENGTH, Usage(5, 70))


def outcome(request_id: str, result: Finish | Failure = ENDED) -> Outcome:
    call = Call(request_id=request_id)
    return Outcome(model="m", call=call, result=result, cause=None, first_s=0.25, duration_s=1.5)


class Case:
    """Outcomes with its metrics."""

    def __init__(self) -> None:
        self.metrics = build_metrics()
        self.outcomes = Outcomes(self.metrics)

    def counted(self) -> float | None:
        name = "dynamo_frontend_request_duration_seconds_count"
        return self.metrics.registry.get_sample_value(name, {"model": "m"})


def test_outcomes_of_one_iteration_are_counted_and_logged_in_order_in_the_next() -> None:
    case = Case()

    async def scenario() -> None:
        case.outcomes.add(outcome("a"))
        case.outcomes.add(outcome("b", Failure(Reason.NO_WORKERS, "gone")))
        assert (case.counted(), logs) == (None, []), "not yet in this iteration"
        await asyncio.sleep(0)
        assert case.counted() == 2
        case.outcomes.add(outcome("c"))
        await asyncio.sleep(0)
        assert case.counted() == 3

    with capture_logs() as logs:
        run_async(scenario())

    assert [line["request_id"] for line in logs] == ["a", "b", "c"]


def test_client_that_asks_after_its_answer_finds_the_request_counted() -> None:
    """The answer is written in the iteration in which the request ends; the next request is read in a later one."""
    case = Case()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            writer.write(b"%d\n" % (case.counted() or 0))
            case.outcomes.add(outcome("a"))
        writer.close()
        await writer.wait_closed()
        has_left.set()

    async def scenario() -> list[int]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            found = []
            for _ in range(50):
                writer.write(b"how many?\n")
                found.append(int(await reader.readline()))
            writer.close()
            await has_left.wait()
            return found

    has_left = asyncio.Event()
    assert run_async(scenario()) == list(range(50))


def test_outcome_in_the_last_turn_of_the_loop_is_logged() -> None:
    case = Case()

    async def last() -> None:
        case.outcomes.add(outcome("a"))

    with capture_logs() as logs:
        run_async(last())

    assert (len(logs), case.counted()) == (1, 1)
