"""Writes lines to a file that may be read slowly, or by nobody any more: who has something to say waits for neither.

A pipe holds some 64 KiB. A process that waits for room in it stands still with all its streams, because of its log.
"""

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

HELD_BYTES_MAX = 1024 * 1024
"""Of lines that wait to be taken; what comes beyond is left out."""
EXIT_S_MAX = 1.0
"""How long a process that ends waits for them to be taken."""


class LineWriter:
    """Not only for one thread.

    | state | a line is | ends by |
    | --- | --- | --- |
    | abreast | written | no room in the file |
    | behind: a thread waits for room | held, or left out where too much is | all that is held has been written |
    """

    def __init__(self, fd: int, on_left_out: Callable[[int], None]) -> None:
        """on_left_out: is told how many lines were, once those before them are written. From another thread."""
        self._fd = fd
        self._on_left_out = on_left_out
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()  # A finaliser that the garbage collector runs in here may have a line, too.
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._left_out = 0
        self._behind: threading.Thread | None = None

    def write(self, lines: Iterable[str]) -> None:
        """In few writes, each of whole lines. Never waits and never raises: there is nowhere to say so."""
        with self._lock:
            for piece in _pieces(lines):
                rest = piece if self._behind else self._put(piece)
                if rest:
                    self._hold(rest)

    def _put(self, data: bytes) -> bytes:
        """Write it. Returns what there is no room for."""
        while data and self._poll.poll(0):
            try:
                data = data[os.write(self._fd, data[: select.PIPE_BUF]) :]  # So much has room, or nothing.
            except BlockingIOError:
                break
            except OSError:
                return b""  # Nobody can read it.
        return data

    def _hold(self, data: bytes) -> None:
        if self._held_bytes + len(data) > HELD_BYTES_MAX:
            self._left_out += data.count(b"\n")
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._behind is None:
            self._behind = threading.Thread(target=self._catch_up, name="log", daemon=True)
            self._behind.start()

    def _catch_up(self) -> None:
        while (left_out := self._written_out()) is None:
            self._poll.poll()
        if left_out:
            self._on_left_out(left_out)

    def _written_out(self) -> int | None:
        """How many lines were left out after those that were held; None: some are held still."""
        with self._lock:
            while self._held:
                data = self._held.popleft()
                rest = self._put(data)
                self._held_bytes -= len(data) - len(rest)
                if rest:
                    self._held.appendleft(rest)
                    return None
            self._behind = None
            left_out, self._left_out = self._left_out, 0
            return left_out

    def close(self) -> None:
        """Give what is held a last chance."""
        if (behind := self._behind) is not None:
            behind.join(EXIT_S_MAX)


def _pieces(lines: Iterable[str]) -> Iterator[bytes]:
    """Lines together, up to what a pipe takes at once: larger pieces are torn apart where several processes write into
    it. Source: pipe(7), "PIPE_BUF".
    """
    piece = b""
    for line in lines:
        data = line.encode(errors="backslashreplace") + b"\n"
        if piece and len(piece) + len(data) > select.PIPE_BUF:
            yield piece
            piece = b""
        piece += data
    if piece:
        yield piece
