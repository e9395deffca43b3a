"""What the kernel takes for one event: a bare `send()` of its bytes to loopback sockets that another process empties.

As an engine's steps come: one event for each of its streams, then nothing for a while, so that their client sleeps and
must be woken. The more streams, the less of that for each. No frontend that writes each token by itself costs less.
"""

import socket
import subprocess
import sys
import time
from contextlib import ExitStack

SENDS = 10_000
"""About so many, but in no fewer and no more steps than below."""
STEPS_MIN, STEPS_MAX = 20, 200
STEP_S = 0.006
ANSWER_S_MAX = 30.0
_READER = """
import selectors, socket, sys
with selectors.DefaultSelector() as selector:
    for _ in range(int(sys.argv[2])):
        selector.register(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            if not key.fileobj.recv(1 << 16):
                selector.unregister(key.fileobj)
"""


def send_us(size: int, streams: int) -> float:
    """CPU microseconds for one send of `size` bytes, user and system time, where `streams` get one in each step."""
    steps = min(max(SENDS // streams, STEPS_MIN), STEPS_MAX)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=streams))
        server.settimeout(ANSWER_S_MAX)
        port = server.getsockname()[1]
        reader = subprocess.Popen([sys.executable, "-c", _READER, str(port), str(streams)])
        stack.callback(reader.wait, ANSWER_S_MAX)  # registered before the connections, so that they are closed by then
        connections = [stack.enter_context(server.accept()[0]) for _ in range(streams)]
        return _cpu_of_sends(connections, bytes(size), steps) * 1e6 / (steps * streams)


def _cpu_of_sends(connections: list[socket.socket], event: bytes, steps: int) -> float:
    for connection in connections:
        connection.setblocking(True)  # with a timeout, Python would poll before each send
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    used_s = 0.0
    for _ in range(steps):
        before = time.process_time()
        for connection in connections:
            connection.send(event)
        used_s += time.process_time() - before
        time.sleep(STEP_S)
    return used_s
