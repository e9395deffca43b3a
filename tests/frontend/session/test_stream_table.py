"""Streams of a session: ids are never used twice, and what has ended has no sequel."""

import pytest

from services.core.errors import Failure, Reason
from services.frontend.session.stream_table import COMPLETED_KEPT, StreamTable
from services.models.tokenizers.byte_level import VOCAB_SIZE
from tests.support.doubles import make_request, run_async


def test_choices_have_consecutive_ids() -> None:
    async def scenario() -> None:
        streams = StreamTable()
        assert streams.add(make_request(), VOCAB_SIZE).id == 1
        assert streams.add(make_request(), VOCAB_SIZE, choices=3).id == 2
        assert (len(streams), streams.next_id) == (4, 5)

    run_async(scenario())


def test_one_that_we_closed_is_unknown_and_one_that_the_worker_ended_has_no_sequel() -> None:
    async def scenario() -> None:
        streams = StreamTable()
        closed, ended = streams.add(make_request(), VOCAB_SIZE), streams.add(make_request(), VOCAB_SIZE)
        assert streams.find(1) is closed
        assert [streams.remove(closed), streams.remove(closed), streams.remove(ended)] == [True, False, True]
        streams.complete(ended)
        assert streams.find(1) is None
        with pytest.raises(Failure) as caught:
            streams.find(2)
        assert caught.value.reason is Reason.PROTOCOL_VIOLATION

    run_async(scenario())


def test_remembers_so_many_that_ended() -> None:
    async def scenario() -> None:
        streams = StreamTable()
        for _ in range(COMPLETED_KEPT + 1):
            stream = streams.add(make_request(), VOCAB_SIZE)
            streams.remove(stream)
            streams.complete(stream)
        assert streams.find(1) is None
        with pytest.raises(Failure):
            streams.find(2)

    run_async(scenario())


def test_what_is_done_with_one_may_end_others() -> None:
    async def scenario() -> None:
        streams = StreamTable()
        streams.add(make_request(), VOCAB_SIZE, choices=3)
        for stream in streams:
            assert streams.remove(stream)
        assert len(streams) == 0

    run_async(scenario())


def test_one_that_is_kept_can_be_taken_after_its_end() -> None:
    async def scenario() -> None:
        streams = StreamTable()
        stream = streams.add(make_request(), VOCAB_SIZE)
        streams.keep([stream.id])
        streams.remove(stream)
        assert streams.take(stream.id) is stream

    run_async(scenario())
