"""A network in memory: connections with latency, bounded buffers, partitions, resets and half-closed ends.

A connection is two endpoints. What one sends is in flight for a while, then waits in the other's receive buffer until
its process reads. In flight and unread together are bounded, as by the windows of TCP.
"""

import errno
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.runtime.determinism import Clocks

if TYPE_CHECKING:
    from simulation.runtime.loop import Future
    from simulation.runtime.world import Process, World

RETRANSMIT_S = 0.2
"""What was lost in a partition arrives this long after its end."""
SPLIT_CHANCE = 0.1
"""The part of writes that arrive in two pieces."""
FIRST_PORT = 40_000
FIRST_DESCRIPTOR = 10
CHUNK_BYTES = 64 * 1024
"""At most this much is read at a time."""

Address = tuple[str, int]


class Endpoint:
    """One end of a connection, as the kernel has it.

    `unread`: what has arrived. `in_flight`: bytes that were sent and that the other end's process has not read.
    `lacks_room`: less than was asked for was sent, so its process is told when there is room again.
    """

    __slots__ = (
        "arrives_at",
        "descriptor",
        "error",
        "has_eof",
        "held",
        "in_flight",
        "is_closed",
        "is_eof_read",
        "lacks_room",
        "local",
        "network",
        "on_readable",
        "on_writable",
        "other",
        "process",
        "unread",
    )

    def __init__(self, network: "Network", process: "Process", local: Address) -> None:
        self.network = network
        self.process = process
        self.local = local
        self.other: Endpoint
        self.unread = bytearray()
        self.in_flight = 0
        self.has_eof = self.is_eof_read = self.is_closed = self.lacks_room = False
        self.error: OSError | None = None
        self.on_readable: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.arrives_at = 0.0  # When the last thing that was sent arrives.
        self.held: deque[tuple[str, bytes]] = deque()  # What a partition keeps from arriving.
        self.descriptor = network.open_descriptor(process)

    @property
    def is_readable(self) -> bool:
        return bool(self.unread) or (self.has_eof and not self.is_eof_read) or self.error is not None

    @property
    def room(self) -> int:
        """How many bytes more can be sent."""
        return self.network.buffer_bytes - self.in_flight

    def send(self, data: bytes) -> int:
        """Send as much as there is room for. Returns how much. Raises OSError."""
        if self.error is not None:
            raise self.error
        size = min(len(data), self.room)
        self.lacks_room = size < len(data)
        if size > 0:
            self.in_flight += size
            self.network.transmit(self, "data", data[:size])
        return max(size, 0)

    def read(self, size_max: int = CHUNK_BYTES) -> bytes:
        """What has arrived; empty: the other end has ended its side. Raises BlockingIOError or another OSError."""
        if self.error is not None:
            raise self.error
        if not self.unread:
            if not self.has_eof:
                raise BlockingIOError
            self.is_eof_read = True
            return b""
        data = bytes(self.unread[:size_max])
        del self.unread[:size_max]
        self.other.in_flight -= len(data)
        if self.other.lacks_room:
            self.other.notify_writable()
        return data

    def notify_readable(self) -> None:
        if self.on_readable is not None:
            self.process.post(self._readable)

    def _readable(self) -> None:
        if self.on_readable is not None:
            self.on_readable()

    def notify_writable(self) -> None:
        if self.on_writable is not None:
            self.process.post(self._writable)

    def _writable(self) -> None:
        if self.on_writable is not None:
            self.on_writable()

    def shut_down(self) -> None:
        """End this side."""
        self.network.transmit(self, "end", b"")

    def close(self, *, resets: bool = False) -> None:
        """Close this end. Unread data, or `resets`, resets the connection."""
        if self.is_closed:
            return
        self.is_closed = True
        self.on_readable = self.on_writable = None
        self.network.close_descriptor(self.process, self.descriptor)
        self.network.transmit(self, "reset" if resets or self.unread else "end", b"")

    def arrive(self, what: str, data: bytes) -> None:
        """Something has come from the other end."""
        if self.is_closed:
            if what == "data":  # As TCP answers bytes for a socket that is closed.
                self.network.transmit(self, "reset", b"")
            return
        if what == "data":
            self.unread += data
        elif what == "end":
            self.has_eof = True
        elif self.error is None:
            self.error = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            self.unread.clear()
            self.notify_writable()
        self.notify_readable()


class Listener:
    """A listening socket of a process."""

    def __init__(self, process: "Process", address: Address, descriptor: int) -> None:
        self.process = process
        self.address = address
        self.descriptor = descriptor
        self.queue: deque[Endpoint] = deque()
        self.on_readable: Callable[[], None] | None = None
        self.is_closed = False

    def arrive(self, endpoint: Endpoint) -> None:
        self.queue.append(endpoint)
        self.notify()

    def notify(self) -> None:
        if self.on_readable is not None:
            self.process.post(self._readable)

    def _readable(self) -> None:
        if self.on_readable is not None:
            self.on_readable()


class Network:
    """All connections of a world, and what disturbs them.

    `latency_s`: of each pair of processes by name, where it is not `latency_default_s`.
    """

    def __init__(self, world: "World", chance: random.Random) -> None:
        self.world = world
        self.chance = chance
        self.latency_default_s = 0.000_05
        self.jitter_s_max = 0.000_2
        self.latency_s: dict[tuple[str, str], float] = {}
        self.buffer_bytes = 256 * 1024
        self.cut: set[tuple[str, str]] = set()  # From one process to another.
        self._cut_endpoints: list[Endpoint] = []
        self._listeners: dict[int, Listener] = {}
        self._endpoints: dict[Process, dict[int, Endpoint]] = {}
        self._descriptors: dict[Process, list[bool]] = {}
        self._next_port = FIRST_PORT

    # Descriptors

    def open_descriptor(self, process: "Process") -> int:
        """The lowest that is free, as the kernel does."""
        used = self._descriptors.setdefault(process, [])
        for number, is_used in enumerate(used):
            if not is_used:
                used[number] = True
                return FIRST_DESCRIPTOR + number
        used.append(True)
        return FIRST_DESCRIPTOR + len(used) - 1

    def close_descriptor(self, process: "Process", descriptor: int) -> None:
        self._descriptors[process][descriptor - FIRST_DESCRIPTOR] = False
        self._endpoints.get(process, {}).pop(descriptor, None)

    def endpoint_of(self, process: "Process", descriptor: int) -> Endpoint:
        return self._endpoints[process][descriptor]

    # Listening and connecting

    def bind(self, address: Address) -> Address:
        """Returns the real address. Raises OSError."""
        host, port = address
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        if port in self._listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return host, port

    def listen(self, process: "Process", address: Address) -> Listener:
        listener = Listener(process, address, self.open_descriptor(process))
        self._listeners[address[1]] = listener
        return listener

    def close_listener(self, listener: Listener) -> None:
        if listener.is_closed:
            return
        listener.is_closed = True
        listener.on_readable = None
        self.close_descriptor(listener.process, listener.descriptor)
        if self._listeners.get(listener.address[1]) is listener:
            del self._listeners[listener.address[1]]
        for endpoint in listener.queue:
            endpoint.close(resets=True)

    async def connect(self, process: "Process", address: Address) -> Endpoint:
        """Raises ConnectionRefusedError."""
        port, self._next_port = self._next_port, self._next_port + 1
        mine = Endpoint(self, process, ("127.0.0.1", port))
        connected = process.loop.create_future()
        self._try_connect(mine, address, connected)
        try:
            await connected
        except BaseException:
            mine.is_closed = True
            self.close_descriptor(process, mine.descriptor)
            other = getattr(mine, "other", None)
            if other is not None:
                self.transmit(mine, "reset", b"")
            raise
        return mine

    def _try_connect(self, mine: Endpoint, address: Address, connected: "Future") -> None:
        """Knock after a while, and again while a partition swallows that."""

        def knock() -> None:
            if connected.done() or mine.process.is_dead:
                return
            listener = self._listeners.get(address[1])
            names = (mine.process.name, mine.process.name if listener is None else listener.process.name)
            if names in self.cut or names[::-1] in self.cut:
                self.world.after(RETRANSMIT_S, knock)
                return
            if listener is None:
                self._answer(mine, connected, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
                return
            other = Endpoint(self, listener.process, address)
            mine.other, other.other = other, mine
            for end in (mine, other):
                self._endpoints.setdefault(end.process, {})[end.descriptor] = end
            listener.arrive(other)
            self._answer(mine, connected, None)

        self.world.after(self._delay_s(mine.process, mine.process), knock)

    def _answer(self, mine: Endpoint, connected: "Future", error: OSError | None) -> None:
        def tell() -> None:
            if connected.done() or mine.process.is_dead:
                return
            if error is None:
                connected.set_result(None)
            else:
                connected.set_exception(error)

        self.world.after(self.latency_default_s, lambda: mine.process.post(tell))

    # What is in flight

    def _delay_s(self, source: "Process", target: "Process") -> float:
        base = self.latency_s.get((source.name, target.name), self.latency_default_s)
        return base + self.chance.random() * self.jitter_s_max

    def transmit(self, source: Endpoint, what: str, data: bytes) -> None:
        """Send something from `source` to its other end, after what was sent before."""
        target = source.other
        if what == "data" and len(data) > 1 and self.chance.random() < SPLIT_CHANCE:
            size = self.chance.randrange(1, len(data))
            self._send(source, target, what, data[:size])
            data = data[size:]
        self._send(source, target, what, data)

    def _send(self, source: Endpoint, target: Endpoint, what: str, data: bytes) -> None:
        source.arrives_at = max(Clocks.now + self._delay_s(source.process, target.process), source.arrives_at)
        self.world.at(source.arrives_at, lambda: self._arrive(source, target, what, data))

    def _arrive(self, source: Endpoint, target: Endpoint, what: str, data: bytes) -> None:
        if source.held or (source.process.name, target.process.name) in self.cut:
            if not source.held:
                self._cut_endpoints.append(source)
            source.held.append((what, data))
        else:
            target.arrive(what, data)

    # Disturbances

    def partition(self, source: str, target: str) -> None:
        """Nothing arrives from one process at the other."""
        self.cut.add((source, target))

    def heal(self, source: str, target: str) -> None:
        """What was sent meanwhile arrives after a while."""
        self.cut.discard((source, target))
        self.world.after(RETRANSMIT_S * (0.5 + self.chance.random()), self._release)

    def _release(self) -> None:
        held, self._cut_endpoints = self._cut_endpoints, []
        for source in held:
            if (source.process.name, source.other.process.name) in self.cut:
                self._cut_endpoints.append(source)
                continue
            items, source.held = source.held, deque()
            for what, data in items:
                source.other.arrive(what, data)

    def close_all_of(self, process: "Process") -> None:
        """The process is gone."""
        for listener in [one for one in self._listeners.values() if one.process is process]:
            self.close_listener(listener)
        for endpoint in list(self._endpoints.get(process, {}).values()):
            endpoint.close()
