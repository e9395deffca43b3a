"""Probes measure the time to the first token over any wire, from a process of their own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bench.clients.requests import wire_of
from bench.clients.wire_probes import first_token_seconds, probing
from bench.clients.wires import HttpWire
from bench.floor.bare_h2 import serving_bare_h2
from bench.measure.errors import BenchError
from tests.bench.sse import DONE, HEAD, token


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """Answer one request with these pieces and close; yields the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            end = server.accept()[0]
            with end:
                end.recv(1000)
                for piece in pieces:
                    end.sendall(piece)

        serving = threading.Thread(target=serve)
        serving.start()
        host, port = server.getsockname()
        yield f"{host}:{port}"
        serving.join()


def test_first_token_of_a_whole_answer_takes_time() -> None:
    with answering(HEAD, token("a"), token("b"), DONE) as address:
        assert first_token_seconds(address, HttpWire(b"request")) > 0


@pytest.mark.parametrize(
    "pieces", [(HEAD, token("a")), (HEAD, DONE), (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n",)]
)
def test_answer_that_is_refused_empty_or_cut_off_is_an_error(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces) as address, pytest.raises(BenchError):
        first_token_seconds(address, HttpWire(b"request"))


def test_probes_go_on_until_the_context_ends() -> None:
    with serving_bare_h2(tokens=2, itl_ms=0.5) as (address, _):
        with probing(address, "grpc") as first_tokens_s:
            assert first_token_seconds(address, wire_of("grpc", 2)()) > 0

        assert first_tokens_s
        assert min(first_tokens_s) > 0


def test_probe_that_is_refused_fails_the_measurement() -> None:
    with (
        serving_bare_h2(tokens=2, itl_ms=0.5) as (address, _),
        pytest.raises(BenchError, match="a probe "),
        probing(address, "http1"),
    ):
        pass
