"""Loaders for tests of helper processes: what they load does what a job's first word says."""

import ctypes
import json
import os
import signal
import socket
import time
from contextlib import suppress

from services.core.errors import Failure, Reason, invalid

LOADER = f"{__name__}:load"


def load(content: bytes) -> "Work":
    """Content "refuse", "crash", "spin" and so on do that while loading."""
    work = Work(content)
    word = content.decode(errors="replace")
    if word in DEEDS:
        work(content)
    return work


class Work:
    """Does what a job says: "DEED ARGUMENT"."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def __call__(self, job: bytes) -> bytes:
        word, _, argument = job.decode().partition(" ")
        if word == "content":
            return self._content
        return DEEDS[word](argument)


def _echo(argument: str) -> bytes:
    return argument.encode()


def _pid(argument: str) -> bytes:
    return json.dumps([os.getpid(), os.getppid()]).encode()


def _refuse(argument: str) -> bytes:
    raise Failure(Reason.PROMPT_TOO_LONG, "no", param="prompt", metadata={"a": "b"})


def _raise(argument: str) -> bytes:
    raise LookupError("a bug")


def _crash(argument: str) -> bytes:
    ctypes.string_at(0)
    raise AssertionError("not reached")


def _signal(argument: str) -> bytes:
    os.kill(os.getpid(), signal.Signals[argument])
    raise AssertionError("not reached")


def _exit(argument: str) -> bytes:
    os._exit(int(argument))


def _spin(argument: str) -> bytes:
    while True:
        pass


def _eat(argument: str) -> bytes:
    return str(len(bytearray(int(argument)))).encode()


def _freeze(argument: str) -> bytes:
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"thawed"


def _sleep(argument: str) -> bytes:
    time.sleep(float(argument))
    return b"slept"


def _nonsense(argument: str) -> bytes:
    for fd in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            socket.socket(fileno=os.dup(fd)).sendall(b"nonsense!")
    return b""


def _give(argument: str) -> bytes:
    return bytes(int(argument))


def _die_once(path: str) -> bytes:
    """Be killed the first time, and answer the second time."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return b"alive"
    os.kill(os.getpid(), signal.SIGKILL)
    raise invalid("job", "not reached")


def _write(argument: str) -> bytes:
    with suppress(BlockingIOError):  # Full.
        os.write(2, b"x" * int(argument))
    return b"written"


DEEDS = {
    "echo": _echo,
    "pid": _pid,
    "refuse": _refuse,
    "raise": _raise,
    "crash": _crash,
    "signal": _signal,
    "exit": _exit,
    "spin": _spin,
    "eat": _eat,
    "freeze": _freeze,
    "sleep": _sleep,
    "nonsense": _nonsense,
    "give": _give,
    "die_once": _die_once,
    "write": _write,
}
