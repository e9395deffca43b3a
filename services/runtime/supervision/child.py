"""Keeps one child process running: starts it, waits until it is ready, restarts it when it exits, and stops it."""

import asyncio
import json
import os
import random
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.runtime.backoff import Backoff
from services.runtime.process import StartupError
from services.runtime.supervision.pdeathsig import with_parent_death_signal
from services.runtime.tasks import wait_event

READY_POLL_S = 0.02
READ_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 64 * 1024
"""A longer line is split, so that a child cannot fill the memory of its supervisor."""
LINES_KEPT_MAX = 15
OUTPUT_TIMEOUT_S = 1.0
"""How long to wait for the last output of a process that has exited."""
KILL_TIMEOUT_S = 5.0
"""How long to wait for a process to exit after SIGKILL."""

Command = Callable[[Path, Mapping[str, str]], Sequence[str]]
"""Returns the program and its arguments. Parameters: the ready file to write, and what the previous process of the
same name wrote there, or {}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildConfig:
    """How to start, restart and stop a child.

    ready_timeout_s: from start to readiness.
    drain_timeout_s: how long the child may drain its streams after SIGTERM.
    stop_timeout_s: from the end of the drain to SIGKILL.
    stable_s: a process that served for at least this long restarts the back-off when it exits.
    is_relayed: whether the child's output goes through the console. Otherwise the child inherits stdout and stderr.
    """

    is_restarted: bool = True
    ready_timeout_s: float = 120.0
    drain_timeout_s: float = 0.0
    stop_timeout_s: float = 10.0
    stable_s: float = 10.0
    is_relayed: bool = True
    backoff: Backoff = field(default_factory=lambda: Backoff(base_s=0.1, cap_s=5.0))


class Console(Protocol):
    """Shows the output of child processes and what happens to them."""

    def line(self, name: str, text: str) -> None:
        """Show one line that the child wrote."""
        ...

    def note(self, name: str, text: str) -> None:
        """Show an expected event in the child's life."""
        ...

    def warn(self, name: str, text: str) -> None:
        """Show an unexpected event in the child's life."""
        ...


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that is ready. ready: the content of its ready file, such as `address`."""

    pid: int
    ready: Mapping[str, str]


class Child:
    """Keeps one process running under one name.

    A process that exits before it was ever ready is a configuration error: it is not restarted, and `wait_serving`
    raises. A process that exits later is restarted without a limit, after a wait that `config.backoff` bounds.
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
        """on_change: called when `serving` has changed."""
        self.name = name
        self.serving: Serving | None = None
        """The process that serves. During a restart: the previous one. None before the first is ready, and once no
        other will follow."""
        self.last_ready: Mapping[str, str] = {}
        """What the last ready process wrote to its ready file. Kept after the process has exited."""
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
        self._has_started = asyncio.Event()  # Or has failed to.
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()
        self._stopped.set()

    def start(self, group: asyncio.TaskGroup) -> None:
        """Supervise the process in a task of `group`, until `stop` or until an exit that no restart follows."""
        self._stopped.clear()
        group.create_task(self._run())

    async def wait_serving(self) -> None:
        """Wait until the first process is ready. Raises StartupError with its last output if it exited before that."""
        await self._has_started.wait()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        tries = 0
        try:
            while not self._stopping.is_set():
                await self._run_process()
                if self._stopping.is_set() or not self._should_restart():
                    return
                tries = 0 if self._was_stable() else tries + 1
                await self._wait_before_restart(tries)
        finally:
            self._ready_file.unlink(missing_ok=True)
            self._stopped.set()
            self._has_started.set()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the timeout. Returns when the process has exited or if none was started."""
        timeout_s = self._config.drain_timeout_s + self._config.stop_timeout_s
        self._stopping.set()
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # A stopped process handles SIGTERM only after it continues.
        if await wait_event(self._stopped, timeout_s):
            return
        self._warn(f"did not exit within {timeout_s:g} s: killed")
        self._signal(signal.SIGKILL)
        if not await wait_event(self._stopped, KILL_TIMEOUT_S):
            self._warn(f"did not exit within {KILL_TIMEOUT_S:g} s of SIGKILL")

    async def _run_process(self) -> None:
        """Start one process and return when it has exited."""
        self._ready_file.unlink(missing_ok=True)
        self._serving_since = None
        is_relayed = self._config.is_relayed
        process = self._process = await asyncio.create_subprocess_exec(
            *with_parent_death_signal(self._command(self._ready_file, self.last_ready)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if is_relayed else None,
            stderr=asyncio.subprocess.STDOUT if is_relayed else None,
            start_new_session=True,  # Only the supervisor receives Ctrl-C; it stops its children in order.
        )
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        try:
            await self._watch_process(process)
        except asyncio.CancelledError:  # The supervisor failed: leave no process behind.
            self._signal(signal.SIGKILL)
            with suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await process.wait()
            raise

    async def _watch_process(self, process: asyncio.subprocess.Process) -> None:
        """Relay its output and watch for its readiness, until it exits."""
        async with asyncio.TaskGroup() as group:
            output = [] if process.stdout is None else [group.create_task(self._relay(process.stdout))]
            readiness = group.create_task(self._wait_ready(process.pid))
            await process.wait()
            readiness.cancel()
            if output:
                await asyncio.wait(output, timeout=OUTPUT_TIMEOUT_S)
                output[0].cancel()  # A grandchild may hold the pipe open.

    async def _wait_ready(self, pid: int) -> None:
        """Return once the process is ready. Kill it after `ready_timeout_s`."""
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
        self.serving, self.last_ready = Serving(pid, ready), ready
        self._serving_since = loop.time()
        addresses = ", ".join(f"{kind} {address}" for kind, address in ready.items())
        self._note(f"ready after {loop.time() - started:.1f} s as pid {pid}: {addresses}")
        self._has_started.set()
        self._on_change()

    async def _relay(self, output: asyncio.StreamReader) -> None:
        """Pass the output of the process to the console, line by line."""
        rest = b""
        while block := await output.read(READ_BYTES_MAX):
            *lines, rest = (rest + block).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._show_line(line)
        if rest:
            self._show_line(rest)

    def _show_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._lines.append(text)
        self._console.line(self.name, text)

    def _was_stable(self) -> bool:
        """Whether the process that just exited had served long enough to restart the back-off."""
        since = self._serving_since
        return since is not None and asyncio.get_running_loop().time() - since >= self._config.stable_s

    def _should_restart(self) -> bool:
        """Report how the process exited. Returns whether to start another."""
        assert self._process is not None
        assert self._process.returncode is not None
        how = describe_exit(self._process.returncode)
        if self.serving is None:
            self._error = StartupError(f"{self.name} {how} before it was ready; {self._last_output()}")
            return False
        if not self._config.is_restarted:
            self._warn(f"{how}; not restarted")
            self.serving = None
            self._on_change()
            return False
        self._warn(how)
        return True

    def _last_output(self) -> str:
        if not self._config.is_relayed:
            return "the reason is in the lines above"
        lines = "\n".join(f"  {line}" for line in self._lines) or "  (none)"
        return f"its last lines:\n{lines}"

    async def _wait_before_restart(self, tries: int) -> None:
        """Wait for the back-off; `stop` ends the wait."""
        delay_s = self._config.backoff.delay_s(tries, self._rng)
        self._note(f"starting again in {delay_s:.2f} s")
        await wait_event(self._stopping, delay_s)

    def _note(self, text: str) -> None:
        self._console.note(self.name, text)

    def _warn(self, text: str) -> None:
        self._console.warn(self.name, text)

    def _signal(self, number: signal.Signals) -> None:
        """Send the signal to the whole process group, unless the process has exited."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def read_ready(path: Path) -> Mapping[str, str] | None:
    """Read a ready file: a JSON object of strings. Returns None if the file is missing or incomplete."""
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
