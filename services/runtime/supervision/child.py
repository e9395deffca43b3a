"""One process of a local cluster and its successors: started, watched until it serves, started again when it dies."""

import asyncio
import json
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.runtime.backoff import Backoff
from services.runtime.process import StartupError
from services.runtime.supervision.pdeathsig import tethered

READY_POLL_S = 0.02
READ_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 64 * 1024
"""A longer line is cut, so that a process cannot fill its supervisor's memory."""
LINES_KEPT_MAX = 15
LOG_REST_TIMEOUT_S = 1.0
"""How long the last lines of a dead process are waited for."""
KILL_TIMEOUT_S = 5.0
"""How long a process may take to vanish after SIGKILL."""

Command = Callable[[Path, Mapping[str, str]], Sequence[str]]
"""The program and its arguments, given the file to write when ready and what the predecessor wrote there (or {})."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildConfig:
    """ready_timeout_s: from start to readiness. drain_timeout_s: how long its streams may go on after SIGTERM.
    end_timeout_s: from then to SIGKILL. stable_s: a process that served for so long is started again as if it were its
    first death. is_relayed: whether its lines go through the console; otherwise they go where its supervisor's do."""

    is_restarted: bool = True
    ready_timeout_s: float = 120.0
    drain_timeout_s: float = 0.0
    end_timeout_s: float = 10.0
    stable_s: float = 10.0
    is_relayed: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=5.0))


class Console(Protocol):
    """Where people see what members say, and what becomes of them."""

    def line(self, name: str, text: str) -> None:
        """A line of a member's own."""
        ...

    def note(self, name: str, text: str) -> None:
        """What is as it should be."""
        ...

    def warn(self, name: str, text: str) -> None:
        """What is not."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that serves, and what it said of itself: `address`, or what its kind says else."""

    pid: int
    ready: Mapping[str, str]


class Child:
    """Keeps one process running under one name.

    A process that dies before it ever served is a mistake to be reported, not repeated: `wait_serving` raises. One that
    dies later is started again, for ever, after a wait that is bounded by `config.backoff`.
    """

    def __init__(
        self,
        name: str,
        command: Command,
        config: ChildConfig,
        *,
        console: Console,
        folder: Path,
        on_change: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self.name = name
        self.serving: Serving | None = None
        """The process that serves; while its successor starts, the one that did. None: none did, or none will again."""
        self.known: Mapping[str, str] = {}
        """What the last process that served said of itself, also after its death."""
        self._command = command
        self._config = config
        self._console = console
        self._ready_file = folder / f"{name}.ready"
        self._on_change = on_change
        self._rng = rng
        self._process: asyncio.subprocess.Process | None = None
        self._serving_since: float | None = None
        self._lines: deque[str] = deque(maxlen=LINES_KEPT_MAX)
        self._error: StartupError | None = None
        self._settled = asyncio.Event()
        self._ending = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def start(self, lives: asyncio.TaskGroup) -> None:
        """Live in `lives` until `end`, or until a death that is not followed by another life."""
        self._ended.clear()
        lives.create_task(self._run())

    async def wait_serving(self) -> None:
        """Return once it serves. Raises StartupError with its last lines when it died before."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        tries = 0
        try:
            while not self._ending.is_set():
                await self._live()
                if self._ending.is_set() or not self._goes_on():
                    return
                tries = 0 if self._was_stable() else tries + 1
                await self._wait_before_restart(tries)
        finally:
            self._ready_file.unlink(missing_ok=True)
            self._ended.set()
            self._settled.set()

    async def end(self) -> None:
        """SIGTERM, and SIGKILL once its time is over. Returns once the process is gone, at once if it never was."""
        timeout_s = self._config.drain_timeout_s + self._config.end_timeout_s
        self._ending.set()
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # A stopped process takes its SIGTERM only when it goes on.
        if await self._has_ended_within(timeout_s):
            return
        self._warn(f"did not end within {timeout_s:g} s: killed")
        self._signal(signal.SIGKILL)
        if not await self._has_ended_within(KILL_TIMEOUT_S):
            self._warn("is not gone after SIGKILL: the system holds it")

    async def _has_ended_within(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def _live(self) -> None:
        """One process from start to end."""
        self._ready_file.unlink(missing_ok=True)
        self._serving_since = None
        is_relayed = self._config.is_relayed
        process = self._process = await asyncio.create_subprocess_exec(
            *tethered(self._command(self._ready_file, self.known)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if is_relayed else None,
            stderr=asyncio.subprocess.STDOUT if is_relayed else None,
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor alone, which ends all in order.
        )
        if self._ending.is_set():
            self._signal(signal.SIGTERM)
        try:
            await self._attend(process)
        except asyncio.CancelledError:  # The supervisor falls: nothing may be left behind.
            self._signal(signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await process.wait()
            raise

    async def _attend(self, process: asyncio.subprocess.Process) -> None:
        async with asyncio.TaskGroup() as group:
            logs = [] if process.stdout is None else [group.create_task(self._relay(process.stdout))]
            readiness = group.create_task(self._watch_readiness(process.pid))
            await process.wait()
            readiness.cancel()
            if logs:
                await asyncio.wait(logs, timeout=LOG_REST_TIMEOUT_S)
                logs[0].cancel()  # Something that the process left behind may hold its log open.

    async def _watch_readiness(self, pid: int) -> None:
        """Return once it serves, or after killing it because that takes too long."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(self._config.ready_timeout_s):
                while (ready := read_ready(self._ready_file)) is None:  # noqa: ASYNC110 (another process writes it)
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            self._warn(f"was not ready within {self._config.ready_timeout_s:g} s: killed")
            self._signal(signal.SIGKILL)
            return
        self.serving, self.known = Serving(pid, ready), ready
        self._serving_since = loop.time()
        addresses = ", ".join(f"{kind} {address}" for kind, address in ready.items())
        self._say(f"ready after {loop.time() - started:.1f} s as pid {pid}: {addresses}")
        self._settled.set()
        self._on_change()

    async def _relay(self, output: asyncio.StreamReader) -> None:
        """Pass the process's lines on to the console."""
        rest = b""
        while block := await output.read(READ_BYTES_MAX):
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take_line(line)
        if rest:
            self._take_line(rest)

    def _take_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._lines.append(text)
        self._console.line(self.name, text)

    def _was_stable(self) -> bool:
        """Whether the process that just ended had served for long, so that its death starts a new row of tries."""
        since = self._serving_since
        return since is not None and asyncio.get_running_loop().time() - since >= self._config.stable_s

    def _goes_on(self) -> bool:
        """Whether another life follows the one that just ended; says so, and why."""
        assert self._process is not None
        assert self._process.returncode is not None
        how = describe_exit(self._process.returncode)
        if self.serving is None:
            self._error = StartupError(f"{self.name} {how} before it was ready; {self._last_words()}")
            return False
        if not self._config.is_restarted:
            self._warn(f"{how}; left dead")
            self.serving = None
            self._on_change()
            return False
        self._warn(how)
        return True

    def _last_words(self) -> str:
        if not self._config.is_relayed:
            return "it has said why, above"
        lines = "\n".join(f"  {line}" for line in self._lines) or "  (none)"
        return f"its last lines:\n{lines}"

    async def _wait_before_restart(self, tries: int) -> None:
        """Sleep, but not through `end`."""
        delay_s = self._config.backoff.delay_s(tries, self._rng)
        self._say(f"starting again in {delay_s:.2f} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ending.wait()

    def _say(self, text: str) -> None:
        self._console.note(self.name, text)

    def _warn(self, text: str) -> None:
        self._console.warn(self.name, text)

    def _signal(self, number: signal.Signals) -> None:
        """Send to the whole process group; nothing if the process is gone."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def read_ready(path: Path) -> Mapping[str, str] | None:
    """What a process wrote when it became ready: a JSON object of strings. None: not yet, or not the whole of it."""
    try:
        ready: dict[str, str] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return ready


def describe_exit(returncode: int) -> str:
    """A return code of `subprocess` in words."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


async def start_all(members: Sequence[Child], lives: asyncio.TaskGroup) -> None:
    """Start them, and return once all serve. Raises the StartupError of the first that fails, in a group."""
    async with asyncio.TaskGroup() as waits:
        for member in members:
            member.start(lives)
            waits.create_task(member.wait_serving())


async def end_all(members: Sequence[Child]) -> None:
    """End them side by side."""
    async with asyncio.TaskGroup() as group:
        for member in members:
            group.create_task(member.end())


async def start_until(stopping: asyncio.Event, start: Coroutine[None, None, None]) -> None:
    """Run `start`, and return once `stopping` is set, be `start` done or not. Raises what it does, in a group."""
    async with asyncio.TaskGroup() as group:
        starting = group.create_task(start)
        await stopping.wait()
        starting.cancel()
