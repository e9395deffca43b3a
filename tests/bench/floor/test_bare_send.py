"""What nothing can cost less than: bare servers and the engine alone do just the work that they stand for."""

import shutil

import grpc
import pytest

from bench.clients.requests import grpc_request
from bench.clients.wrk import Load
from bench.comparison.grpc_figures import grpc_figures, split
from bench.floor.bare_engine import engine_us, request, shared
from bench.floor.bare_grpc import echo, messages
from bench.floor.bare_send import event_of, send_us
from services.stubs import inference_pb2, inference_pb2_grpc
from services.worker.engines.mocker.sequence import MockerSequence

LOAD = Load(streams=3, answers=2, tokens=5)


@pytest.mark.parametrize("size", [20, 40, 200, 255, 262, 300])
def test_an_event_has_exactly_the_size_asked_for_and_its_chunk_tells_its_own(size: int) -> None:
    event = event_of(size)

    head, _, rest = event.partition(b"\r\n")
    assert len(event) == size
    assert len(rest) == int(head, 16) + len(b"\r\n")
    assert rest[:7] == b"data: x"
    assert rest[-4:] == b"\n\n\r\n"


@pytest.mark.skipif(shutil.which("wrk") is None, reason="needs wrk")
def test_a_bare_send_takes_time_and_its_server_ends_with_the_load() -> None:
    assert send_us(LOAD, size=200, itl_ms=0.5, pause_us=1.0) > 0


def test_an_engine_alone_takes_time() -> None:
    assert engine_us(LOAD, itl_ms=0.5) > 0


def test_two_engines_share_the_streams() -> None:
    assert [sum(shared(streams)) for streams in (1, 2, 7)] == [1, 2, 7]
    assert max(shared(7)) == 4


def test_every_token_asked_for_is_a_character_of_its_own() -> None:
    """Whatever is cut into tokens makes fewer events than there are tokens."""
    sequence = MockerSequence(1, request(tokens=500))

    drawn = [token for _ in range(500) for token in sequence.step(context_length=10_000).token_ids]

    assert len(drawn) == 500
    assert max(drawn) < 0x80


def test_the_bare_server_sends_each_token_and_the_marker() -> None:
    with echo(tokens=5, itl_ms=0.5) as (address, _), grpc.insecure_channel(address) as channel:
        items = list(inference_pb2_grpc.InferenceStub(channel).Generate(grpc_request(5), timeout=10))

    assert [item.delta.position for item in items[:-1]] == [0, 1, 2, 3, 4]
    assert items[-1] == inference_pb2.GenerateResponse(complete_final=True)
    assert [item.SerializeToString() for item in items] == messages(5)


def test_a_server_of_grpc_streams_is_measured_by_its_tokens() -> None:
    with echo(tokens=5, itl_ms=0.5) as (address, pid):
        figures = grpc_figures(address, pid, LOAD)

    assert figures["tokens_per_message"] == 1
    assert figures["cpu_us_per_token"]


def test_messages_are_told_apart() -> None:
    assert list(split(b"\0\0\0\0\2ab\0\0\0\0\0\0\0\0\0\1c")) == [b"ab", b"", b"c"]
