"""Writes lines to a file without ever waiting for its reader, which may be slow or gone.

A pipe holds about 64 KiB. A process that waited for space in the pipe of its log would stall all its streams.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

BUFFERED_BYTES_MAX = 1024 * 1024
"""Size of the buffer for lines that the file has no space for. When it is full, lines are dropped."""
EXIT_S_MAX = 1.0
"""How long an exiting process waits for the buffer to be written."""


class LineWriter:
    """Writes lines to a file descriptor. Thread-safe.

    | state | a new line is | ends when |
    | --- | --- | --- |
    | direct | written | the file has no space |
    | buffering: a thread waits for space | buffered, or dropped if the buffer is full | the buffer has been written |
    """

    def __init__(self, fd: int, on_dropped: Callable[[int], None]) -> None:
        """on_dropped: called with the number of dropped lines after the lines before them have been written, from
        another thread."""
        self._fd = fd
        self._on_dropped = on_dropped
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()  # Reentrant: the garbage collector may run a finalizer here that logs.
        self._buffer: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._dropped = 0
        self._flusher: threading.Thread | None = None

    def write(self, lines: Iterable[str]) -> None:
        """Write with few system calls, each of complete lines. Never waits and never raises."""
        with self._lock:
            for block in _blocks(lines):
                rest = block if self._flusher else self._write_now(block)
                if rest:
                    self._append(rest)

    def _write_now(self, data: bytes) -> bytes:
        """Write as much as the file has space for. Returns the rest."""
        while data and self._poll.poll(0):
            try:
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]  # Always fits after POLLOUT.
            except BlockingIOError:
                break
            except OSError:
                return b""  # The reader is gone.
        return data

    def _append(self, data: bytes) -> None:
        if self._buffered_bytes + len(data) > BUFFERED_BYTES_MAX:
            self._dropped += data.count(b"\n")
            return
        self._buffer.append(data)
        self._buffered_bytes += len(data)
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush, name="log", daemon=True)
            self._flusher.start()

    def _flush(self) -> None:
        while (dropped := self._flush_now()) is None:
            self._poll.poll()
        if dropped:
            self._on_dropped(dropped)

    def _flush_now(self) -> int | None:
        """Write the buffer as far as possible. Returns the number of dropped lines, or None if data is left."""
        with self._lock:
            while self._buffer:
                data = self._buffer.popleft()
                rest = self._write_now(data)
                self._buffered_bytes -= len(data) - len(rest)
                if rest:
                    self._buffer.appendleft(rest)
                    return None
            self._flusher = None
            dropped, self._dropped = self._dropped, 0
            return dropped

    def close(self) -> None:
        """Wait for the buffer to be written, at most EXIT_S_MAX."""
        if (flusher := self._flusher) is not None:
            flusher.join(EXIT_S_MAX)


def _blocks(lines: Iterable[str]) -> Iterator[bytes]:
    """Join lines into blocks of at most PIPE_BUF bytes, which a pipe with several writers does not interleave. A longer
    line is a block of its own. Source: pipe(7), "PIPE_BUF".
    """
    block = b""
    for line in lines:
        data = line.encode(errors="backslashreplace") + b"\n"
        if block and len(block) + len(data) > select.PIPE_BUF:
            yield block
            block = b""
        block += data
    if block:
        yield block
