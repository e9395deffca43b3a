"""Line writer: lines come whole and in order, in few writes, and nobody waits for whoever is to read them."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from services.runtime.log_writer import BUFFERED_BYTES_MAX, LineWriter

PIPE_BYTES = 16 * 4096
WAIT_S_MAX = 10.0


class Pipe:
    """A writer into a pipe, and who reads it. left_out: what the writer told."""

    def __init__(self, flags: int = 0) -> None:
        reading, self.writing = os.pipe2(flags)
        self.reader = os.fdopen(reading, "rb", buffering=0)
        self.left_out: list[int] = []
        self.has_told = threading.Event()
        self.writer = LineWriter(self.writing, self._on_left_out)

    def _on_left_out(self, lines: int) -> None:
        self.left_out.append(lines)
        self.has_told.set()

    def read(self, lines: int) -> list[str]:
        """So many, as they come."""
        return self._read(lambda data: data.count(b"\n") >= lines).decode().splitlines()

    def read_until_told(self) -> list[str]:
        """All, up to what is left out."""
        data = self._read(lambda _: self.has_told.is_set()) + self._read(lambda _: not self._is_readable())
        return data.decode().splitlines()

    def _read(self, is_over: Callable[[bytes], bool]) -> bytes:
        data, give_up_at = b"", time.monotonic() + WAIT_S_MAX
        while not is_over(data):
            assert time.monotonic() < give_up_at, f"{data.count(bytes([10]))} lines came"
            if self._is_readable():
                data += os.read(self.reader.fileno(), 4096)
        return data

    def _is_readable(self) -> bool:
        return bool(select.select([self.reader], [], [], 0.001)[0])

    def close(self) -> None:
        self.reader.close()  # A writer that is behind gives up.
        self.writer.close()
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with closing(Pipe()) as one:
        yield one


def numbered(first: int, count: int) -> list[str]:
    """Lines of 100 bytes."""
    return [f"{number:99}" for number in range(first, first + count)]


def test_lines_leave_together_in_pieces_that_a_pipe_of_several_processes_takes_whole() -> None:
    lines = ["x" * 100] * 100 + ["ü" * 1000] * 3 + ["half \udcff of a pair"]
    with closing(Pipe(os.O_DIRECT)) as pipe:  # Each read gets one write.
        pipe.writer.write(lines)
        pipe.writer.write(["the end"])
        writes = list(iter(lambda: pipe.reader.read(65536), b"the end\n"))

    assert b"".join(writes).decode().splitlines() == [*lines[:-1], r"half \udcff of a pair"]
    assert len(writes) == 4
    assert all(one.endswith(b"\n") and len(one) <= select.PIPE_BUF for one in writes)


def test_lines_that_nobody_reads_are_held_and_come_in_order_once_somebody_does(pipe: Pipe) -> None:
    rounds, lines = 3, BUFFERED_BYTES_MAX // 200  # In all more than it holds at a time.
    for _ in range(rounds):
        for first in range(lines):
            pipe.writer.write(numbered(first, 1))
        assert pipe.read(lines) == numbered(0, lines)

    pipe.writer.write(["more"])
    assert pipe.read(1) == ["more"]
    assert pipe.left_out == []


def test_a_line_longer_than_a_pipe_takes_comes_whole(pipe: Pipe) -> None:
    pipe.writer.write(["x" * 300_000, "short"])

    assert pipe.read(2) == ["x" * 300_000, "short"]


def test_what_is_too_much_to_hold_is_left_out_and_told_once_the_rest_is_read(pipe: Pipe) -> None:
    count = 20_000
    for first in range(0, count, 10):
        pipe.writer.write(numbered(first, 10))

    assert pipe.left_out == []
    lines = pipe.read_until_told()
    assert lines == numbered(0, len(lines))
    assert pipe.left_out == [count - len(lines)]
    assert BUFFERED_BYTES_MAX < len(lines) * 100 <= BUFFERED_BYTES_MAX + PIPE_BYTES


def test_a_reader_that_leaves_fails_nothing(pipe: Pipe) -> None:
    pipe.writer.write(numbered(0, 5000))  # More than a pipe holds.

    pipe.reader.close()

    pipe.writer.write(["more"])
    assert pipe.left_out == []


def test_a_line_that_comes_up_while_others_are_written_is_not_waited_for_for_ever(pipe: Pipe) -> None:
    """The garbage collector may run a finaliser at any moment, and asyncio's log what they find."""

    def lines() -> Iterator[str]:
        yield "first"
        pipe.writer.write(["between"])
        yield "last"

    writing = threading.Thread(target=pipe.writer.write, args=(lines(),), daemon=True)
    writing.start()
    writing.join(WAIT_S_MAX)

    assert not writing.is_alive()
    assert sorted(pipe.read(3)) == ["between", "first", "last"]


LEAVING = """
import logging
from services.runtime.log import configure_logging, log_event

configure_logging("worker", level="info", log_format="json")
for number in range(3000):
    log_event(logging.INFO, "line", {"number": number, "text": "x" * 50})
print("said", flush=True)
"""


def test_a_process_that_ends_gives_a_slow_reader_time_for_what_was_held() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == b"said\n", "it waits for nobody"
        lines = process.stderr.read().splitlines()

    assert process.wait() == 0
    assert len(lines) == 3000
