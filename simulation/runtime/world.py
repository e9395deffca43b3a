"""The world of one run: its processes, its virtual time, and whose turn it is."""

import asyncio
import gc
import heapq
import random
import struct
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

from simulation.runtime.determinism import Clocks, SeededRandom, begin
from simulation.runtime.loop import Handle, Loop
from simulation.runtime.network import Network

_TURN = struct.Struct("<dII")
TURNS_MAX = 2_000_000
"""A run that takes more turns of event loops never comes to rest."""


class Process:
    """A simulated process: its event loop, and what is done to it from outside.

    `is_frozen`: nothing of it runs, while its sockets still receive. `is_dead`: it was killed, or has ended.
    `number`: which process of its world it is.
    """

    def __init__(self, world: "World", name: str, number: int) -> None:
        self.world = world
        self.name = name
        self.number = number
        self.is_frozen = self.is_dead = False
        self.skew_s = 0.0
        self.loop = Loop(self, world.network)  # type: ignore[abstract]  # What nothing here needs.
        self.events: list[Callable[[], None]] = []  # Of sockets: they come in any order within a turn.
        self.owner: Any = None  # The object of the product that runs in it.
        self.on_end: Callable[[], None] | None = None
        self.on_turn: Callable[[], None] | None = None
        self._is_awake = False

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run the main coroutine. The process ends with it."""
        self.loop.create_task(main, name="main").add_done_callback(self._on_main_ended)

    def _on_main_ended(self, main: "asyncio.Task[Any]") -> None:
        if not main.cancelled() and (error := main.exception()) is not None:
            self.world.on_exception(self, {"message": "the main task failed", "exception": error})
        self.world.end(self, "exited")

    def wake(self) -> None:
        """It has something to do."""
        if not (self._is_awake or self.is_frozen or self.is_dead):
            self._is_awake = True
            self.world.awake.append(self)

    def post(self, event: Callable[[], None]) -> None:
        """An event of a socket, handled in the next turn."""
        if not self.is_dead:
            self.events.append(event)
            self.wake()

    def sleep(self) -> None:
        """It is not awake any more: it has had its turn, is frozen, or dead."""
        self._is_awake = False

    @property
    def has_work(self) -> bool:
        return bool(self.events or self.loop.ready)

    def run_turn(self, chance: random.Random) -> int:
        """One iteration of its event loop. Returns how many callbacks it had."""
        events, self.events = self.events, []
        if len(events) > 1:
            chance.shuffle(events)
        for event in events:
            self.loop.ready.append(Handle(event, (), None, 0.0))
        count = len(self.loop.ready)
        self.loop.run_turn()
        return count


class World:
    """Runs the processes of one seed until nothing is left to do."""

    def __init__(self, seed: str, *, turn_s_max: float = 0.0) -> None:
        """`turn_s_max`: virtual time that one iteration of an event loop takes at most."""
        begin(seed)
        self.random = SeededRandom(f"{seed}/schedule")
        self.turn_s_max = turn_s_max
        self.awake: list[Process] = []
        self.network = Network(self, SeededRandom(f"{seed}/network"))
        self.processes: dict[str, Process] = {}
        self.current: Process | None = None
        self.trace: list[str] = []
        self.problems: list[str] = []
        self.fingerprint = 0
        self.turns = 0
        self._agenda: list[tuple[float, int, Process | None, Any]] = []
        self._entries = self._spawned = 0

    # Processes

    def spawn(self, name: str, main: Callable[[], Coroutine[Any, Any, Any]]) -> Process:
        """Start a process. `main`: called within it."""
        self._spawned += 1
        process = self.processes[name] = Process(self, name, self._spawned)
        self.say(name, "starts")

        async def run() -> None:
            await main()

        process.start(run())
        return process

    def end(self, process: Process, how: str) -> None:
        """The process is gone; the kernel closes its sockets."""
        if process.is_dead:
            return
        process.is_dead = True
        self.say(process.name, how)
        process.events.clear()
        process.loop.ready.clear()
        if process in self.awake:
            self.awake.remove(process)
        self.network.close_all_of(process)
        if process.on_end is not None:
            process.on_end()

    def kill(self, process: Process) -> None:
        """As SIGKILL does."""
        self.end(process, "is killed")

    def freeze(self, process: Process) -> None:
        """As SIGSTOP does."""
        if not process.is_dead and not process.is_frozen:
            self.say(process.name, "freezes")
            process.is_frozen = True
            if process in self.awake:
                self.awake.remove(process)
            process.sleep()

    def thaw(self, process: Process) -> None:
        """As SIGCONT does."""
        if not process.is_dead and process.is_frozen:
            self.say(process.name, "thaws")
            process.is_frozen = False
            if process.has_work:
                process.wake()

    # Time

    def add_timer(self, process: Process, handle: Handle) -> None:
        self._push(handle.when(), process, handle)

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something to the world at a time."""
        self._push(when, None, action)

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something to the world in a while."""
        self._push(Clocks.now + delay_s, None, action)

    def _push(self, when: float, process: Process | None, what: Any) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (when, self._entries, process, what))

    @property
    def now(self) -> float:
        return Clocks.now

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run until the virtual time has come, or `stop`. Raises AssertionError if it never rests."""
        agenda, awake = self._agenda, self.awake
        while not stop():
            while agenda and agenda[0][0] <= Clocks.now:
                self._begin_entry(*heapq.heappop(agenda)[2:])
            if awake:
                self._run_turn(awake)
                continue
            while agenda and agenda[0][2] is not None and agenda[0][3].is_cancelled:
                heapq.heappop(agenda)
            if not agenda or agenda[0][0] > until:
                Clocks.now = until
                return
            Clocks.now = max(Clocks.now, agenda[0][0])

    def _run_turn(self, awake: list[Process]) -> None:
        index = self.random.randrange(len(awake)) if len(awake) > 1 else 0
        process = awake[index]
        awake[index] = awake[-1]
        awake.pop()
        process.sleep()
        self.current = process
        asyncio._set_running_loop(process.loop)
        Clocks.skew_s = process.skew_s
        try:
            count = process.run_turn(self.random)
        finally:
            asyncio._set_running_loop(None)
            self.current = None
        if process.on_turn is not None:
            process.on_turn()
        if process.has_work:
            process.wake()
        self.turns += 1
        assert self.turns < TURNS_MAX, "the run does not come to rest"
        self.fingerprint = zlib.crc32(_TURN.pack(Clocks.now, process.number, count), self.fingerprint)
        if self.turn_s_max:
            Clocks.now += self.random.random() * self.turn_s_max

    def _begin_entry(self, process: Process | None, what: Any) -> None:
        if process is None:
            what()
        elif not process.is_dead and not what.is_cancelled:
            process.loop.ready.append(what)
            process.wake()

    # What happened

    def collect(self) -> None:
        """Find what nobody refers to any more. An exception in it that nobody retrieved is a problem."""
        gc.collect()

    def say(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        line = f"{Clocks.now:12.6f} {who:<12} {what}"
        self.trace.append(line)
        self.fingerprint = zlib.crc32(line.encode(), self.fingerprint)

    def on_exception(self, process: Process, context: dict[str, Any]) -> None:
        """An exception that nobody handled: always a fault."""
        error = context.get("exception")
        text = f"{process.name}: {context['message']}: {error!r}"
        self.say(process.name, f"PROBLEM {context['message']}: {error!r}")
        self.problems.append(text)
