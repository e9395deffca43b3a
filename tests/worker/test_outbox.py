"""Outbox: all that one frontend has not been sent yet is one message, and it is bounded."""

import asyncio

from services.request import Delta
from services.stubs import worker_pb2
from services.worker.outbox import Outbox
from tests.support import run_async


def test_what_comes_in_one_turn_of_the_loop_travels_in_one_message() -> None:
    async def scenario() -> worker_pb2.AttachResponse:
        outbox = Outbox(100)
        outbox.add_tokens(1, Delta(0, [11]))
        outbox.add_tokens(2, Delta(5, (21, 22)))
        outbox.add_end(worker_pb2.StreamEnd(stream_id=1, complete_final=True))
        outbox.set_goaway(1.0)
        message = await outbox.take()
        outbox.add_tokens(2, Delta(7, [23]))
        assert (await outbox.take()).step == worker_pb2.Step(
            stream_ids=[2], positions=[7], token_counts=[1], token_ids=[23]
        )
        return message

    message = run_async(scenario())

    assert message.step == worker_pb2.Step(
        stream_ids=[1, 2], positions=[0, 5], token_counts=[1, 2], token_ids=[11, 21, 22]
    )
    assert [end.stream_id for end in message.ends] == [1]
    assert message.HasField("goaway")


def test_an_end_travels_with_the_last_tokens() -> None:
    async def scenario() -> worker_pb2.AttachResponse:
        outbox, finished = Outbox(100), asyncio.Event()

        async def request() -> None:
            await finished.wait()
            outbox.add_end(worker_pb2.StreamEnd(stream_id=1, complete_final=True))

        async with asyncio.TaskGroup() as group:
            taken = group.create_task(outbox.take())
            group.create_task(request())
            await asyncio.sleep(0)  # From here on both wait.
            outbox.add_tokens(1, Delta(0, [11]))
            finished.set()
        return taken.result()

    message = run_async(scenario())

    assert message.step.token_ids == [11]
    assert [end.stream_id for end in message.ends] == [1]


def test_what_gathers_while_a_message_is_on_its_way_is_one_entry_for_each_stream() -> None:
    async def scenario() -> worker_pb2.Step:
        outbox = Outbox(100)
        for position in range(3):
            outbox.add_tokens(1, Delta(position, [10 + position]))
            outbox.add_tokens(2, Delta(5 + position, [20 + position]))
        return (await outbox.take()).step

    assert run_async(scenario()) == worker_pb2.Step(
        stream_ids=[1, 2], positions=[0, 5], token_counts=[3, 3], token_ids=[10, 11, 12, 20, 21, 22]
    )


def test_ends_count_towards_the_bound_by_their_length() -> None:
    """Once 200,000 refused requests lay unread and the session went on."""

    async def scenario() -> list[bool]:
        outbox, seen = Outbox(100), []
        end = worker_pb2.StreamEnd(stream_id=1, error=worker_pb2.Error(reason="DRAINING", detail="x" * 200))
        outbox.add_end(end)
        seen.append(outbox.is_over.is_set())
        await outbox.take()
        outbox.add_end(end)
        seen.append(outbox.is_over.is_set())
        outbox.add_end(end)
        return [*seen, outbox.is_over.is_set()]

    assert run_async(scenario()) == [False, False, True]


def test_streams_that_begin_count_towards_the_bound() -> None:
    """Of those that are cancelled there is nothing else to send: once they filled the memory beside it."""

    async def scenario() -> list[bool]:
        outbox, seen = Outbox(3), []
        for stream_id in range(4):
            outbox.add_begun(stream_id)
            seen.append(outbox.is_over.is_set())
        return seen

    assert run_async(scenario()) == [False, False, False, True]
