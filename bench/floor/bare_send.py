"""What the kernel takes for one event: a server that does nothing but a `send()` for each, under the very same load.

    python -m bench.floor.bare_send BYTES TOKENS ANSWERS ITL_MS PAUSE_US

It answers each request with TOKENS events of BYTES, framing and all. Two groups of streams, as if of two workers, get
an event each ITL_MS. What it says at the end, after ANSWERS, is the CPU time of the sends alone: not of accepting,
reading requests, waiting, and keeping count. No frontend that writes each token by itself costs less.

A send on loopback includes what the kernel does to wake the reader. In a burst (PAUSE_US 0) the first one does that for
many; a frontend, which has something to do for each token, finds the reader asleep most of the time. So the measure of
a frontend are sends with a pause after each, in which it spins.
"""

import select
import socket
import statistics
import sys
import time
from dataclasses import dataclass, field

from bench.clients.wrk import RUN_S_MAX, Load, run_wrk
from bench.measure.child_process import ChildProcess, send

GROUPS = 2
BACKLOG = 4096
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
FRONTEND_PAUSE_US = 10.0
"""What a good frontend has to do for each token besides."""
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def send_us(load: Load, size: int, itl_ms: float, pause_us: float) -> float:
    """CPU microseconds for one event of `size` bytes. Raises BenchError if a client failed."""
    with ChildProcess("floor.bare_send", size, load.tokens, load.total_answers, itl_ms, pause_us) as child:
        run_wrk(f"http://127.0.0.1:{child.receive()}", load)
        return float(child.receive())


def event_of(size: int) -> bytes:
    """An HTTP chunk of exactly so many bytes, at least 20, that is one event."""
    width = len(f"{size:x}")
    payload = size - width - len("\r\n\r\n")
    return f"{payload:0{width}x}\r\ndata: {'x' * (payload - len('data: ') - 2)}\n\n\r\n".encode()


def clock_seconds() -> float:
    """What taking the time takes, and would be taken for a part of the send."""
    spans_s = []
    for _ in range(1000):
        before = time.process_time()
        spans_s.append(time.process_time() - before)
    return statistics.median(spans_s)


def spin(pause_s: float) -> None:
    over_at = time.perf_counter() + pause_s
    while time.perf_counter() < over_at:
        pass


@dataclass
class Group:
    """The streams that get their events at the same time. left: of each, how many more."""

    due: float
    left: dict[socket.socket, int] = field(default_factory=dict)
    events: int = 0
    cpu_s: float = 0.0

    def step(self, event: bytes, pause_s: float) -> list[socket.socket]:
        """Returns those that have had all."""
        for connection in self.left:
            before = time.process_time()
            connection.send(event)
            self.cpu_s += time.process_time() - before
            spin(pause_s)
        self.events += len(self.left)
        self.left = {connection: left - 1 for connection, left in self.left.items()}
        return [connection for connection, left in self.left.items() if not left]


class Server:
    """One thread, one epoll."""

    def __init__(self, size: int, tokens: int, itl_s: float, pause_s: float) -> None:
        self._event, self._tokens, self._itl_s, self._pause_s = event_of(size), tokens, itl_s, pause_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        self._connections: dict[int, socket.socket] = {}
        now = time.monotonic()
        self._groups = [Group(now + itl_s * number / GROUPS) for number in range(GROUPS)]
        self.port = self._listener.getsockname()[1]

    def serve(self, answers: int) -> float:
        """Until so many are given. Returns the microseconds of CPU time for an event."""
        give_up_at = time.monotonic() + RUN_S_MAX
        while answers and time.monotonic() < give_up_at:
            for fd, _ in self._epoll.poll(max(0.0, min(group.due for group in self._groups) - time.monotonic())):
                self._accept() if fd == self._listener.fileno() else self._read(fd)
            answers -= sum(self._step(group) for group in self._groups if group.due <= time.monotonic())
        cpu_s, events = sum(group.cpu_s for group in self._groups), sum(group.events for group in self._groups)
        return (cpu_s / events - clock_seconds()) * 1e6

    def _step(self, group: Group) -> int:
        """Returns how many answers it has ended. One that is late does not catch up."""
        group.due = max(group.due + self._itl_s, time.monotonic())
        over = group.step(self._event, self._pause_s)
        for connection in over:
            del group.left[connection]
            connection.send(END)
        return len(over)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections[connection.fileno()] = connection
        self._epoll.register(connection, select.EPOLLIN)

    def _read(self, fd: int) -> None:
        """A request: they are small, and come whole. An end: `wrk` leaves when it has all."""
        connection = self._connections[fd]
        if not connection.recv(1 << 16):
            self._epoll.unregister(fd)
            self._connections.pop(fd).close()
            return
        connection.send(HEAD)
        min(self._groups, key=lambda group: len(group.left)).left[connection] = self._tokens


def main(size: int, tokens: int, answers: int, itl_ms: float, pause_us: float) -> None:
    server = Server(size, tokens, itl_ms * 1e-3, pause_us * 1e-6)
    send(server.port)
    send(server.serve(answers))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
