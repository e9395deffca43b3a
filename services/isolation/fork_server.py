"""A fork server: loads something once, then forks helpers that work with it. Run as a program by `server_process.py`.

It runs no client's text, has one thread, and ends when its parent closes the control socket or dies.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

from services.isolation import frames, limits
from services.isolation.bounds import Bounds
from services.isolation.frames import Frame, Kind
from services.isolation.helper import Work, outcome, serve
from services.runtime.backoff import Backoff
from services.runtime.supervision.pdeathsig import die_with

RECEIVE_BYTES_MAX = 4096
REQUEST_BYTES = frames.HEAD.size + frames.HELPER.size


class ForkServer:
    """Forks helpers and reports how they end."""

    def __init__(self, control: socket.socket, work: Work, bounds: Bounds) -> None:
        self._control = control
        self._work = work
        self._bounds = bounds
        self._numbers: dict[int, int] = {}  # By pid, of the helpers that run.
        self._pid = os.getpid()
        self._wakeup, wake = socket.socketpair()
        self._wakeup.setblocking(False)
        wake.setblocking(False)
        self._wake = wake  # Kept open.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve until the control socket closes. Then no helper is left."""
        poll = select.poll()
        for sock in (self._control, self._wakeup):
            poll.register(sock, select.POLLIN)
        is_open = True
        while is_open:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup.fileno() in ready:
                self._wakeup.recv(RECEIVE_BYTES_MAX)
                self._reap()
            if self._control.fileno() in ready:
                is_open = self._obey()
        for pid in self._numbers:
            os.kill(pid, signal.SIGKILL)
        for pid in self._numbers:
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        """Do what one message asks for. Returns False once there are no more."""
        message, fds, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 1)
        if not message:
            return False
        buffer = bytearray(message)
        [request] = frames.take_frames(buffer)
        [number] = frames.HELPER.unpack(request.payload)
        if request.kind is Kind.FORK:
            with socket.socket(fileno=fds[0]) as sock:
                self._fork(number, sock)
        elif request.kind is Kind.KILL:
            for pid in [pid for pid, one in self._numbers.items() if one == number]:
                os.kill(pid, signal.SIGKILL)  # Not reaped yet, so its pid is not another's.
        return True

    def _fork(self, number: int, sock: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:  # Too many processes, or no memory.
            status = frames.HELPER_AND_STATUS.pack(number, error.errno or 0)
            frames.send(self._control, Frame(Kind.NOT_FORKED, status))
            return
        if pid == 0:
            self._become_helper(sock)
        self._numbers[pid] = number
        frames.send(self._control, Frame(Kind.FORKED, frames.HELPER.pack(number)))

    def _become_helper(self, sock: socket.socket) -> NoReturn:
        """Run in the forked process. It exits without running exit handlers, which belong to the fork server."""
        status = 1
        try:
            die_with(self._pid)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (self._control, self._wakeup, self._wake):
                one.close()
            serve(sock, self._work, self._bounds)
            status = 0
        except OSError:  # The parent has closed the socket.
            status = 0
        except SystemExit:  # The fork server has ended already.
            status = 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        """Report the helpers that have ended."""
        while self._numbers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended = frames.HELPER_AND_STATUS.pack(self._numbers.pop(pid), os.waitstatus_to_exitcode(status))
            frames.send(self._control, Frame(Kind.EXITED, ended))


def load(loader: str, content: bytes, bounds: Bounds) -> Work | Frame:
    """Load what helpers work with; the frame says why that failed. `loader`: "module:function"."""
    found: list[Work] = []

    def run(content: bytes) -> bytes:
        module, _, function = loader.partition(":")
        found.append(getattr(importlib.import_module(module), function)(content))
        return b""

    with limits.bounded(bounds.load_cpu_s_max, bounds.load_bytes_max):
        loaded = outcome(run, content)
    return found[0] if found else loaded


def main() -> None:
    """Arguments: the number of the open control socket, the loader, and the bounds as JSON. The content comes first."""
    control_fd, loader, bounds_json = sys.argv[1:]
    given = json.loads(bounds_json)
    bounds = Bounds(**given | {"backoff": Backoff(**given["backoff"])})
    limits.prepare(bounds.stack_bytes_max)
    with socket.socket(fileno=int(control_fd)) as control:
        if (content := frames.receive(control)) is None:
            return
        work = load(loader, content.payload, bounds)
        del content
        if isinstance(work, Frame):
            frames.send(control, work)
            return
        gc.collect()
        gc.freeze()  # Collections in helpers would copy the pages that they share with this process.
        frames.send(control, Frame(Kind.LOADED))
        ForkServer(control, work, bounds).run()


if __name__ == "__main__":
    with suppress(OSError):  # The parent has closed the control socket.
        main()
    os._exit(0)  # What is loaded may have exit handlers that wait for threads.
