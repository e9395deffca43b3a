"""LineWriter writes complete lines in order with few system calls, and never waits for their reader."""

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
from tests.support.clock import WAIT_S

PIPE_BYTES = 16 * 4096


class Pipe:
    """A writer to a pipe, and the reader of the pipe. dropped: the reported numbers of dropped lines."""

    def __init__(self, flags: int = 0) -> None:
        reading, self.writing = os.pipe2(flags)
        self.reader = os.fdopen(reading, "rb", buffering=0)
        self.dropped: list[int] = []
        self.has_reported = threading.Event()
        self.writer = LineWriter(self.writing, self._on_dropped)

    def _on_dropped(self, lines: int) -> None:
        self.dropped.append(lines)
        self.has_reported.set()

    def read(self, lines: int) -> list[str]:
        """Read until at least `lines` lines have arrived."""
        return self._read(lambda data: data.count(b"\n") >= lines).decode().splitlines()

    def read_until_reported(self) -> list[str]:
        """Read everything until the writer has reported dropped lines."""
        data = self._read(lambda _: self.has_reported.is_set()) + self._read(lambda _: not self._is_readable())
        return data.decode().splitlines()

    def _read(self, is_over: Callable[[bytes], bool]) -> bytes:
        data, give_up_at = b"", time.monotonic() + WAIT_S
        while not is_over(data):
            assert time.monotonic() < give_up_at, f"only {data.count(bytes([10]))} lines arrived"
            if self._is_readable():
                data += os.read(self.reader.fileno(), 4096)
        return data

    def _is_readable(self) -> bool:
        return bool(select.select([self.reader], [], [], 0.001)[0])

    def close(self) -> None:
        self.reader.close()  # A writer that waits for space gives up.
        self.writer.close()
        os.close(self.writing)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    with closing(Pipe()) as one:
        yield one


def numbered(first: int, count: int) -> list[str]:
    """Lines of 100 bytes."""
    return [f"{number:99}" for number in range(first, first + count)]


def test_lines_are_written_in_blocks_that_a_shared_pipe_does_not_interleave() -> None:
    lines = ["x" * 100] * 100 + ["ü" * 1000] * 3 + ["half \udcff of a pair"]
    with closing(Pipe(os.O_DIRECT)) as pipe:  # Each read gets one write.
        pipe.writer.write(lines)
        pipe.writer.write(["the end"])
        writes = list(iter(lambda: pipe.reader.read(65536), b"the end\n"))

    assert b"".join(writes).decode().splitlines() == [*lines[:-1], r"half \udcff of a pair"]
    assert len(writes) == 4
    assert all(one.endswith(b"\n") and len(one) <= select.PIPE_BUF for one in writes)


def test_unread_lines_are_buffered_and_arrive_in_order(pipe: Pipe) -> None:
    rounds, lines = 3, BUFFERED_BYTES_MAX // 200  # In total more than the buffer holds.
    for _ in range(rounds):
        for first in range(lines):
            pipe.writer.write(numbered(first, 1))
        assert pipe.read(lines) == numbered(0, lines)

    pipe.writer.write(["more"])
    assert pipe.read(1) == ["more"]
    assert pipe.dropped == []


def test_line_longer_than_the_pipe_arrives_complete(pipe: Pipe) -> None:
    pipe.writer.write(["x" * 300_000, "short"])

    assert pipe.read(2) == ["x" * 300_000, "short"]


def test_lines_beyond_the_buffer_are_dropped_and_counted_once_the_rest_is_read(pipe: Pipe) -> None:
    count = 20_000
    for first in range(0, count, 10):
        pipe.writer.write(numbered(first, 10))

    assert pipe.dropped == []
    lines = pipe.read_until_reported()
    assert lines == numbered(0, len(lines))
    assert pipe.dropped == [count - len(lines)]
    assert BUFFERED_BYTES_MAX < len(lines) * 100 <= BUFFERED_BYTES_MAX + PIPE_BYTES


def test_reader_that_leaves_causes_no_error(pipe: Pipe) -> None:
    pipe.writer.write(numbered(0, 5000))  # More than a pipe holds.

    pipe.reader.close()

    pipe.writer.write(["more"])
    assert pipe.dropped == []


def test_write_from_within_a_write_does_not_deadlock(pipe: Pipe) -> None:
    """The garbage collector may run a finalizer at any moment, and asyncio's finalizers log."""

    def lines() -> Iterator[str]:
        yield "first"
        pipe.writer.write(["between"])
        yield "last"

    writing = threading.Thread(target=pipe.writer.write, args=(lines(),), daemon=True)
    writing.start()
    writing.join(WAIT_S)

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


def test_exiting_process_waits_for_its_buffered_lines_to_be_read() -> None:
    process = subprocess.Popen([sys.executable, "-c", LEAVING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        assert process.stdout.readline() == b"said\n", "logging does not wait"
        lines = process.stderr.read().splitlines()

    assert process.wait() == 0
    assert len(lines) == 3000
