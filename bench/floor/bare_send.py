"""The kernel's cost for one event: a server that calls `send()` for each event and does nothing else.

    python -m bench.floor.bare_send BYTES TOKENS ANSWERS ITL_MS PAUSE_US

The server answers each request with TOKENS events of BYTES, framing included. Two groups of streams, as if from two
workers, receive one event every ITL_MS. After ANSWERS the server reports the CPU time of the sends alone, without
accepting, reading requests, waiting and bookkeeping. No frontend that writes each token by itself costs less.

A send on loopback includes the kernel's work to wake the reader. In a burst (PAUSE_US 0) the first send wakes it for
many. A frontend has other work to do for each token, and mostly finds the reader asleep, so the fair comparison is a
send that is followed by a pause. The server spins during the pause.
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
"""The other work that a good frontend does for each token."""
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def send_us(load: Load, size: int, itl_ms: float, pause_us: float) -> float:
    """Return the CPU microseconds for one event of `size` bytes. Raises BenchError if a client failed."""
    with ChildProcess("floor.bare_send", size, load.tokens, load.total_answers, itl_ms, pause_us) as child:
        run_wrk(f"http://127.0.0.1:{child.receive()}", load)
        return float(child.receive())


def event_of(size: int) -> bytes:
    """Return one event as an HTTP chunk of exactly `size` bytes, at least 20."""
    width = len(f"{size:x}")
    payload = size - width - len("\r\n\r\n")
    return f"{payload:0{width}x}\r\ndata: {'x' * (payload - len('data: ') - 2)}\n\n\r\n".encode()


def clock_seconds() -> float:
    """Return the cost of reading the clock, which would otherwise count as a part of the send."""
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
    """Streams that receive their events at the same time. `left`: events still to send, by connection."""

    due: float
    left: dict[socket.socket, int] = field(default_factory=dict)
    events: int = 0
    cpu_s: float = 0.0

    def step(self, event: bytes, pause_s: float) -> list[socket.socket]:
        """Send one event to each stream. Returns the streams that have received all of theirs."""
        for connection in self.left:
            before = time.process_time()
            connection.send(event)
            self.cpu_s += time.process_time() - before
            spin(pause_s)
        self.events += len(self.left)
        self.left = {connection: left - 1 for connection, left in self.left.items()}
        return [connection for connection, left in self.left.items() if not left]


class Server:
    """A server with one thread and one epoll."""

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
        """Serve this many answers. Returns the CPU microseconds per event."""
        give_up_at = time.monotonic() + RUN_S_MAX
        while answers and time.monotonic() < give_up_at:
            for fd, _ in self._epoll.poll(max(0.0, min(group.due for group in self._groups) - time.monotonic())):
                self._accept() if fd == self._listener.fileno() else self._read(fd)
            answers -= sum(self._step(group) for group in self._groups if group.due <= time.monotonic())
        cpu_s, events = sum(group.cpu_s for group in self._groups), sum(group.events for group in self._groups)
        return (cpu_s / events - clock_seconds()) * 1e6

    def _step(self, group: Group) -> int:
        """Send one event to a group. Returns how many answers this ended. A late group does not catch up."""
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
        """Handle a request, which is small and arrives in one piece, or the end of a connection that `wrk` closed."""
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
