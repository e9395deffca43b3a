"""Answers read raw: each event has the time of its last byte, and what a stream lacks is seen."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.clients import stream_reader
from bench.clients.stream_reader import Answer, Disturbance, read_answers

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def chunk(**content: Any) -> bytes:
    event = b"data: %b\n\n" % json.dumps(content).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def token(text: str) -> bytes:
    return chunk(choices=[{"index": 0, "text": text}])


USAGE = chunk(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7})


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of one connection after the other."""

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


def test_an_event_has_the_time_of_the_piece_with_its_last_byte() -> None:
    half = len(HEAD) + 10
    raw = HEAD + token("a") + token("b")
    answer = Answer([(1.0, raw[:half]), (2.0, raw[half:]), (3.0, token("c") + token("d"))])

    assert [(event.at, event.text) for event in answer.events] == [(2.0, "a"), (2.0, "b"), (3.0, "c"), (3.0, "d")]
    assert answer.gaps_s == [0.0, 1.0, 0.0]
    assert answer.text == "abcd"


def test_only_events_with_text_have_gaps() -> None:
    answer = Answer([(1.0, HEAD + token("a")), (2.0, token("")), (4.0, token("b")), (9.0, USAGE + DONE)])

    assert answer.gaps_s == [3.0]


def test_usage_is_there_if_it_was_told() -> None:
    assert Answer([(1.0, HEAD + token("a") + USAGE + DONE)]).usage == (5, 2)
    assert Answer([(1.0, HEAD + token("a") + DONE)]).usage is None


def test_an_answer_is_complete_with_its_end_and_without_an_error() -> None:
    assert Answer([(1.0, HEAD + token("a") + DONE)]).is_complete
    assert not Answer([(1.0, HEAD + token("a"))]).is_complete
    assert not Answer([(1.0, HEAD + chunk(error={"message": "lost"}) + DONE)]).is_complete


def test_the_longest_gap_is_that_of_what_came_later() -> None:
    pieces = [(at, token("a")) for at in (1.0, 3.0, 3.5, 4.5)]

    assert Answer([*pieces, (4.6, DONE)]).longest_gap_s(since=3.2) == 1.0
    assert Answer([*pieces, (4.6, DONE)]).longest_gap_s(since=2.0) == 2.0


def test_an_answer_that_never_went_on_has_a_gap_as_long_as_it_was_waited_for() -> None:
    assert Answer([(1.0, token("a")), (2.0, token("b"))], over_at=12.0).longest_gap_s(since=1.5) == 10.0


def test_answers_are_read_to_their_ends() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(HEAD + token("a"))
        connection.sendall(token("b") + USAGE + DONE)

    with serving(serve) as url:
        read = read_answers(url, [b"{}", b"{}"])

    assert [(answer.is_complete, answer.text) for answer in read] == [(True, "ab")] * 2


def test_a_strike_comes_in_the_midst_and_who_gets_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on once it was struck, and then hangs."""
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
