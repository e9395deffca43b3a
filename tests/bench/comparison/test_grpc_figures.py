"""The figures of a gRPC server are per token, and its messages are counted."""

from bench.clients.wrk import Load
from bench.comparison.grpc_figures import grpc_figures, split_messages
from bench.floor.bare_grpc import serving_bare_grpc

LOAD = Load(streams=3, answers=2, tokens=5)


def test_figures_of_a_grpc_server_are_per_token() -> None:
    with serving_bare_grpc(tokens=5, itl_ms=0.5) as (address, pid):
        figures = grpc_figures(address, pid, LOAD)

    assert figures["tokens_per_message"] == 1
    assert figures["cpu_us_per_token"]


def test_messages_of_a_stream_are_split() -> None:
    assert list(split_messages(b"\0\0\0\0\2ab\0\0\0\0\0\0\0\0\0\1c")) == [b"ab", b"", b"c"]
