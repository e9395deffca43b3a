"""The stream reader records when each event arrived, and notices incomplete answers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bench.clients import stream_reader
from bench.clients.stream_reader import Answer, Disturbance, read_answers
from tests.bench.sse import DONE, HEAD, USAGE, chunk, token


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that accepts two connections, one after the other."""

    def run() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=run)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def test_event_has_the_arrival_time_of_its_last_byte() -> None:
    half = len(HEAD) + 10
    raw = HEAD + token("a") + token("b")
    answer = Answer([(1.0, raw[:half]), (2.0, raw[half:]), (3.0, token("c") + token("d"))])

    assert [(event.at, event.text) for event in answer.events] == [(2.0, "a"), (2.0, "b"), (3.0, "c"), (3.0, "d")]
    assert answer.gaps_s == [0.0, 1.0, 0.0]
    assert answer.text == "abcd"


def test_only_events_with_text_have_gaps() -> None:
    answer = Answer([(1.0, HEAD + token("a")), (2.0, token("")), (4.0, token("b")), (9.0, USAGE + DONE)])

    assert answer.gaps_s == [3.0]


def test_usage_is_read_if_the_answer_reports_it() -> None:
    assert Answer([(1.0, HEAD + token("a") + USAGE + DONE)]).usage == (5, 2)
    assert Answer([(1.0, HEAD + token("a") + DONE)]).usage is None


def test_answer_is_complete_if_it_ends_with_done_and_has_no_error() -> None:
    assert Answer([(1.0, HEAD + token("a") + DONE)]).is_complete
    assert not Answer([(1.0, HEAD + token("a"))]).is_complete
    assert not Answer([(1.0, HEAD + chunk(error={"message": "lost"}) + DONE)]).is_complete


def test_longest_gap_ignores_gaps_that_ended_before_the_given_time() -> None:
    pieces = [(at, token("a")) for at in (1.0, 3.0, 3.5, 4.5)]

    assert Answer([*pieces, (4.6, DONE)]).longest_gap_s(since=3.2) == 1.0
    assert Answer([*pieces, (4.6, DONE)]).longest_gap_s(since=2.0) == 2.0


def test_incomplete_answer_has_a_gap_until_it_was_given_up() -> None:
    assert Answer([(1.0, token("a")), (2.0, token("b"))], over_at=12.0).longest_gap_s(since=1.5) == 10.0


def test_answers_are_read_until_they_end() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + token("a"))
        connection.sendall(token("b") + USAGE + DONE)

    with serving(serve) as url:
        read = read_answers(url, [b"{}", b"{}"])

    assert [(answer.is_complete, answer.text) for answer in read] == [(True, "ab")] * 2


def test_disturbance_happens_mid_stream_and_silent_streams_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server continues after the disturbance and then hangs."""
    monkeypatch.setattr(stream_reader, "QUIET_S_MAX", 0.2)
    was_struck, is_over = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + token("a"))
        assert was_struck.wait(5)
        connection.sendall(token("b"))
        assert is_over.wait(5)

    with serving(serve) as url:
        [answer] = read_answers(url, [b"{}"], Disturbance(0.01, was_struck.set))
        is_over.set()
        read_answers(url, [b"{}"])

    assert answer.text == "ab"
    assert not answer.is_complete
    assert answer.over_at >= answer.token_times[-1] + 0.2
