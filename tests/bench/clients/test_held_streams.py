"""HeldStreams counts each token with its time, and reports why a stream that cannot continue was lost."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.clients.held_streams import HeldHttp, HeldRpcs, HeldStreams
from bench.clients.wires import DATA, END_STREAM, GOAWAY, HEADERS, RST_STREAM, frame, literal

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
MESSAGE = b"the request"
STREAMS = 3
SECONDS_MAX = 10.0


@contextmanager
def held(*pieces: bytes, is_closed: bool = False) -> Iterator[tuple[HeldStreams, Callable[[bytes], None]]]:
    """Open streams to a server that sends these pieces on each; yields the streams and a function to send more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[socket.socket] = []

        def serve() -> None:
            for _ in range(STREAMS):
                end = server.accept()[0]
                assert end.recv(100) == MESSAGE
                end.sendall(b"".join(pieces))
                ends.append(end)
                if is_closed:
                    end.shutdown(socket.SHUT_RDWR)

        def send(data: bytes) -> None:
            for end in ends:
                end.sendall(data)

        serving = threading.Thread(target=serve)
        serving.start()
        host, port = server.getsockname()
        with HeldStreams(f"{host}:{port}", lambda: HeldHttp(MESSAGE)) as streams:
            streams.open(STREAMS, per_s=1000.0)
            serving.join()
            yield streams, send
        for end in ends:
            end.close()


def test_stream_has_begun_once_its_first_token_arrives() -> None:
    with held(HEAD) as (streams, send):
        streams.read(0.01)
        assert streams.begun == 0

        send(b"data: 1\n\n")
        streams.wait_begun(SECONDS_MAX)

        assert (streams.begun, streams.errors) == (STREAMS, {})


def test_reset_restarts_the_count_of_tokens_and_gaps() -> None:
    with held(HEAD, b"data: 1\n\n") as (streams, send):
        streams.wait_begun(SECONDS_MAX)
        streams.reset()

        send(b"data: 2\n\ndata: 3\n\n")
        while streams.tokens < 2 * STREAMS:
            streams.read(0.01)

        assert all(gaps[0] > 0 and gaps[1] == 0 for gaps in streams.gaps_s())


def test_silent_stream_has_a_gap_up_to_now() -> None:
    with held(HEAD, b"data: 1\n\n") as (streams, _):
        streams.wait_begun(SECONDS_MAX)
        streams.reset()

        streams.read(0.02)

        assert all(len(gaps) == 1 and gaps[0] >= 0.02 for gaps in streams.gaps_s())


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "HTTP/1.1 503 Service Unavailable"),
        (HEAD + b"data: 1\n\nevent: error\ndata: {}\n\n", "event: error"),
        (HEAD + b"data: 1\n\ndata: [DONE]\n\n", "[DONE]"),
    ],
)
def test_stream_that_cannot_continue_is_lost_with_its_reason(piece: bytes, why: str) -> None:
    with held(piece) as (streams, _):
        streams.wait_begun(SECONDS_MAX)

        assert (streams.begun, streams.errors) == (0, {why: STREAMS})


def test_stream_whose_connection_closes_is_lost() -> None:
    with held(HEAD, is_closed=True) as (streams, _):
        streams.wait_begun(SECONDS_MAX)

        assert streams.errors == {"hung up": STREAMS}


def test_stream_without_a_token_in_time_is_lost() -> None:
    with held(HEAD) as (streams, _):
        streams.wait_begun(0.02)

        assert streams.errors == {"no token": STREAMS}


def test_lost_stream_over_http_closes_its_connection() -> None:
    with held(HEAD + b"data: 1\n\n") as (streams, send):
        streams.wait_begun(SECONDS_MAX)

        send(b"data: [DONE]\n\n")
        while sum(streams.errors.values()) < STREAMS:
            streams.read(0.01)

        assert (streams.begun, streams.errors, streams.gaps_s()) == (0, {"[DONE]": STREAMS}, [])


@contextmanager
def held_rpcs(number: int, per_connection: int) -> Iterator[tuple[HeldStreams, list[socket.socket]]]:
    """Open rpcs to a server that reads nothing; yields the rpcs and the server's ends of their connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with HeldStreams(f"{host}:{port}", lambda: HeldRpcs("/path", b"m"), per_connection) as rpcs:
            rpcs.open(number, per_s=1000.0)
            ends = [server.accept()[0] for _ in range(-(-number // per_connection))]
            yield rpcs, ends
        for end in ends:
            end.close()


def test_rpcs_share_connections_and_each_has_its_own_gaps() -> None:
    with held_rpcs(5, per_connection=2) as (rpcs, ends):
        ends[0].sendall(frame(DATA, 0, 1, b"token") + frame(DATA, 0, 3, b"token") + frame(DATA, 0, 3, b"token"))
        ends[2].sendall(frame(DATA, 0, 1, b"token"))
        while rpcs.tokens < 4:
            rpcs.read(0.01)

        assert rpcs.begun == 3
        assert [len(gaps) for gaps in rpcs.gaps_s()] == [1, 2, 1, 1, 1]  # The last one of each is up to now.


@pytest.mark.parametrize(
    ("frames", "why", "lost"),
    [
        (frame(RST_STREAM, 0, 1, bytes(4)), "RST_STREAM", 1),
        (frame(HEADERS, END_STREAM, 1, literal(b"grpc-status", b"14")), "grpc-status 14", 1),
        (frame(HEADERS, END_STREAM, 1, b""), "no status", 1),
        (frame(GOAWAY, 0, 0, bytes(8)), "GOAWAY", 2),
    ],
)
def test_rpc_that_cannot_continue_is_lost_and_another_one_goes_on(frames: bytes, why: str, lost: int) -> None:
    with held_rpcs(3, per_connection=2) as (rpcs, ends):
        ends[0].sendall(b"".join(frame(DATA, 0, number, b"token") for number in (1, 3)) + frames)
        ends[1].sendall(frame(DATA, 0, 1, b"token"))
        while rpcs.begun < 3 - lost or not rpcs.errors:
            rpcs.read(0.01)

        ends[0].sendall(frame(DATA, 0, 1, b"of a lost rpc"))
        rpcs.wait_begun(SECONDS_MAX)

        assert (rpcs.errors, rpcs.begun) == ({why: lost}, 3 - lost)


def test_rpcs_of_a_connection_that_closes_are_lost() -> None:
    with held_rpcs(4, per_connection=2) as (rpcs, ends):
        ends[0].close()
        while not rpcs.errors:
            rpcs.read(0.01)

        assert rpcs.errors.total() == 2
        assert len(rpcs.gaps_s()) == 2
