"""A fork server, as its parent sees it: one process that starts once, forks helpers, and ends once."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason
from services.isolation import frames
from services.isolation.bounds import END_TIMEOUT_S, Bounds
from services.isolation.frames import Frame, Kind
from services.runtime.supervision.child import KILL_TIMEOUT_S, describe_exit
from services.runtime.supervision.pdeathsig import with_parent_death_signal

MODULE = "services.isolation.fork_server"
READ_BYTES_MAX = 64 * 1024
POLL_S = 0.01
"""Between looks at a process that is about to end."""


class ServerLost(Exception):
    """The fork server has ended, does not answer, or cannot fork. Another may be started."""


@dataclass(frozen=True, slots=True)
class Forked:
    """A helper. sock: our end of its job socket. exited: its return code, as `subprocess` gives it."""

    number: int
    sock: socket.socket
    exited: "asyncio.Future[int]"


class ServerProcess:
    """One fork server process. Use it on the loop that started it."""

    @classmethod
    async def start(cls, name: str, loader: str, content: bytes, bounds: Bounds) -> "ServerProcess":
        """Start a process that loads `content`, and wait until it can fork. `name`: of the content, for a failure.

        Raises Failure if it cannot load that, or crashes; ServerLost if it cannot be started, or was killed.
        """
        server = cls._spawn(name, loader, bounds)
        try:
            await server._load(content)
        except BaseException:
            await server.close()
            raise
        return server

    @classmethod
    def _spawn(cls, name: str, loader: str, bounds: Bounds) -> "ServerProcess":
        with ExitStack() as opened:
            try:
                ours, theirs = socket.socketpair()
                opened.enter_context(ours)
                with theirs:
                    report = _Report()
                    opened.callback(report.close)
                    arguments = (str(theirs.fileno()), loader, json.dumps(asdict(bounds)))
                    # Not by asyncio: uvloop runs fork handlers, and gRPC's stops its threads. This does not run them.
                    process = subprocess.Popen(
                        with_parent_death_signal([sys.executable, "-P", "-m", MODULE, *arguments]),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=report.writable,
                        pass_fds=(theirs.fileno(),),
                        start_new_session=True,  # Ctrl-C in a terminal is for the parent.
                    )
            except OSError as error:
                raise ServerLost(f"it cannot be started: {error}") from error
            opened.pop_all()  # The server closes them.
        return cls(name, process, ours, report, bounds)

    def __init__(
        self, name: str, process: subprocess.Popen[bytes], control: socket.socket, report: "_Report", bounds: Bounds
    ) -> None:
        self._name = name
        self._process = process
        self._control = control
        self._report = report
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._numbers = count(1)
        self._loaded: asyncio.Future[Frame] = self._loop.create_future()
        self._forked: dict[int, asyncio.Future[None]] = {}
        self._exited: dict[int, asyncio.Future[int]] = {}
        self._unsent: deque[tuple[bytes, list[socket.socket]]] = deque()  # Two for each helper, at most.
        self.is_lost = False
        control.setblocking(False)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _load(self, content: bytes) -> None:
        try:
            async with asyncio.timeout(self._bounds.load_s_max):
                with suppress(ConnectionError):  # It has ended; how, is told below.
                    await self._loop.sock_sendall(self._control, frames.encode(Frame(Kind.CONTENT, content)))
                self._loop.add_reader(self._control, self._on_readable)
                answer = await self._loaded
        except TimeoutError:
            raise self._not_loaded(f"takes more than {self._bounds.load_s_max:g} s to load") from None
        except ServerLost:
            raise await self._load_failure() from None
        if answer.kind is Kind.REFUSAL:
            raise frames.unpacked(answer.payload)
        if answer.kind is Kind.NO_MEMORY:
            raise self._not_loaded(f"takes more than {self._bounds.load_bytes_max >> 20} MiB of memory to load")
        if answer.kind is not Kind.LOADED:
            raise self._not_loaded(f"cannot be loaded: {_last_line(answer.payload.decode(errors='replace'))}")

    async def _load_failure(self) -> Exception:
        """Why the process ended while it loaded."""
        returncode = await self._wait_end()
        if returncode in (-9, -15):
            return ServerLost(describe_exit(returncode))
        how = f"{describe_exit(returncode)}: {self.take_report()}"
        return self._not_loaded(f"crashes the process that loads it, which {how}")

    def _not_loaded(self, why: str) -> Failure:
        return Failure(Reason.INTERNAL, f"{self._name} {why}")

    async def fork(self) -> Forked:
        """Fork a helper. Raises ServerLost."""
        number = next(self._numbers)
        ours, theirs = self._socket_pair()
        forked = self._forked[number] = self._loop.create_future()
        exited = self._exited[number] = self._loop.create_future()
        try:
            with theirs:
                self._request(Kind.FORK, number, theirs)
            async with asyncio.timeout(self._bounds.fork_s_max):
                await forked
        except BaseException as error:
            ours.close()  # The helper ends with its socket.
            if isinstance(error, TimeoutError):
                self.lose()
                raise ServerLost(f"it forks no helper within {self._bounds.fork_s_max:g} s") from None
            raise
        finally:
            self._forked.pop(number, None)
        return Forked(number, ours, exited)

    def _socket_pair(self) -> tuple[socket.socket, socket.socket]:
        try:
            return socket.socketpair()
        except OSError as error:
            raise ServerLost(f"no socket can be opened: {error}") from error

    def kill(self, helper: Forked) -> None:
        """Kill a helper, which may have ended."""
        if helper.number in self._exited:
            with suppress(ServerLost):
                self._request(Kind.KILL, helper.number)

    async def wait_exit(self, helper: Forked) -> int:
        """Wait for a helper that ends. Returns how, as `subprocess` does. Raises ServerLost. Call it once."""
        try:
            async with asyncio.timeout(self._bounds.fork_s_max):
                return await helper.exited
        except TimeoutError:
            self.lose()
            raise ServerLost(f"it reports no end of a helper within {self._bounds.fork_s_max:g} s") from None

    def take_report(self) -> str:
        """The first line that the server or a helper has written to its standard error since the last call."""
        return self._report.take()

    def _request(self, kind: Kind, number: int, sock: socket.socket | None = None) -> None:
        message = frames.encode(Frame(kind, frames.HELPER.pack(number)))
        if self.is_lost:
            raise ServerLost("it has ended")
        try:
            if self._unsent or not self._send(message, [] if sock is None else [sock]):
                self._unsent.append((message, [] if sock is None else [sock.dup()]))
                self._loop.add_writer(self._control, self._on_writable)
        except OSError as error:
            self.lose()
            raise ServerLost(f"it takes no requests: {error}") from error

    def _send(self, message: bytes, socks: list[socket.socket]) -> bool:
        """Returns False if the kernel has no room, which takes a few hundred messages that the process has not read."""
        try:
            sent = socket.send_fds(self._control, [message], [sock.fileno() for sock in socks])
        except BlockingIOError:
            return False
        assert sent == len(message), "the kernel takes a few bytes whole or not at all"
        return True

    def _on_writable(self) -> None:
        try:
            while self._unsent and self._send(*self._unsent[0]):
                for sock in self._unsent.popleft()[1]:
                    sock.close()
        except OSError:
            self.lose()
            return
        if not self._unsent:
            self._loop.remove_writer(self._control)

    def _on_readable(self) -> None:
        try:
            received = self._control.recv(READ_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.lose()
            return
        self._buffer += received
        for frame in frames.take_frames(self._buffer):
            self._on_frame(frame)

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.FORKED:
                [number] = frames.HELPER.unpack(frame.payload)
                _set(self._forked.get(number), None)
            case Kind.NOT_FORKED:
                number, errno = frames.HELPER_AND_STATUS.unpack(frame.payload)
                del self._exited[number]
                _fail(self._forked.get(number), ServerLost(f"no helper can be forked: {os.strerror(errno)}"))
            case Kind.EXITED:
                number, returncode = frames.HELPER_AND_STATUS.unpack(frame.payload)
                _set(self._exited.pop(number), returncode)
            case _:
                _set(self._loaded, frame)

    def lose(self) -> None:
        """Kill the process, and with it its helpers. Whoever waits for it gets ServerLost."""
        self._disconnect()
        self._kill()

    async def close(self) -> None:
        """End the process, and wait until it has ended with its helpers. Whoever waits for it gets ServerLost."""
        self._disconnect()
        try:
            await self._wait_end()
        finally:
            self._kill()
            self._report.close()

    def _disconnect(self) -> None:
        """Close the control socket, at whose end the process ends."""
        if self.is_lost:
            return
        self.is_lost = True
        self._loop.remove_reader(self._control)
        self._loop.remove_writer(self._control)
        self._control.close()
        while self._unsent:
            for sock in self._unsent.popleft()[1]:
                sock.close()
        every: list[asyncio.Future[Any]] = [self._loaded, *self._forked.values(), *self._exited.values()]
        for waiting in every:
            _fail(waiting, ServerLost("it has ended"))

    async def _wait_end(self) -> int:
        """Wait until the process has ended, and kill it if that takes long. Returns its return code."""
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                return await self._wait_returncode()
        self._kill()
        async with asyncio.timeout(KILL_TIMEOUT_S):
            return await self._wait_returncode()

    async def _wait_returncode(self) -> int:
        while (returncode := self._process.poll()) is None:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(POLL_S)
        return returncode

    def _kill(self) -> None:
        self._process.kill()  # Does nothing if it has been waited for.


class _Report:
    """A pipe for the standard error of a fork server and its helpers. When it is full, more is dropped."""

    def __init__(self) -> None:
        self._readable, self.writable = os.pipe()
        self._is_open = True
        os.set_blocking(self._readable, False)
        os.set_blocking(self.writable, False)  # For all processes that share it.

    def take(self) -> str:
        if not self._is_open:
            return ""
        with suppress(BlockingIOError):
            written = os.read(self._readable, READ_BYTES_MAX).decode(errors="replace")
            return written.strip().partition("\n")[0][:QUOTED_CHARACTERS_MAX]
        return ""

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._readable)
            os.close(self.writable)


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:QUOTED_CHARACTERS_MAX]


def _set(waiting: "asyncio.Future[Any] | None", value: object) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(value)


def _fail(waiting: "asyncio.Future[Any] | None", error: Exception) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_exception(error)
        waiting.exception()  # Retrieved, in case nobody waits.
