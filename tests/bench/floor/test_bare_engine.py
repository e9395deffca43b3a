"""The mocker alone is measured on the requests of the bench, shared between two engines."""

from bench.clients.wrk import Load
from bench.floor.bare_engine import engine_us, request, streams_per_engine
from services.worker.engines.mocker.sequence import MockerSequence

LOAD = Load(streams=3, answers=2, tokens=5)


def test_engine_alone_takes_time() -> None:
    assert engine_us(LOAD, itl_ms=0.5) > 0


def test_two_engines_share_the_streams() -> None:
    assert [sum(streams_per_engine(streams)) for streams in (1, 2, 7)] == [1, 2, 7]
    assert max(streams_per_engine(7)) == 4


def test_every_token_of_the_request_is_one_character() -> None:
    """A character of several tokens would make fewer events than there are tokens."""
    sequence = MockerSequence(1, request(tokens=500))

    drawn = [token for _ in range(500) for token in sequence.step(context_length=10_000).token_ids]

    assert len(drawn) == 500
    assert max(drawn) < 0x80
