"""The event loop of one simulated process. The world runs its turns, and chooses whose turn it is."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from simulation.runtime.determinism import Clocks
from simulation.runtime.network import Endpoint, Network
from simulation.runtime.transport import Server, Transport

if TYPE_CHECKING:
    from simulation.runtime.world import Process

EXECUTOR_S_MAX = 0.002
"""A job of an executor takes up to this long, and runs at its end."""


class Handle:
    """A callback that waits for its turn, or for its time."""

    __slots__ = ("_args", "_callback", "_context", "_when", "is_cancelled")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None, when: float
    ) -> None:
        self._callback = callback
        self._args = args
        self._context = contextvars.copy_context() if context is None else context
        self._when = when
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._callback, self._args = _nothing, ()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        """In the time of the loop."""
        return self._when

    def run(self) -> None:
        self._context.run(self._callback, *self._args)

    def __repr__(self) -> str:
        return f"<Handle {getattr(self._callback, '__qualname__', self._callback)}>"


def _nothing() -> None:
    """Replaces what was cancelled."""


class Task(asyncio.Task[Any]):
    """A task whose place in sets does not depend on its address."""

    __slots__ = ("number",)

    def __hash__(self) -> int:
        return self.number

    number: int


class Future(asyncio.Future[Any]):
    """A future whose place in sets does not depend on its address."""

    number: int

    def __hash__(self) -> int:
        return self.number


class Loop(asyncio.AbstractEventLoop):
    """Callbacks run in the order in which they were called, as asyncio promises."""

    def __init__(self, process: "Process", network: "Network") -> None:
        self._process = process
        self._network = network
        self.ready: deque[Handle] = deque()
        self._objects = 0
        # Those of a killed process must not be collected while the world runs: their `finally` blocks would run.
        self._tasks: set[Task] = set()

    # Callbacks

    def time(self) -> float:
        return Clocks.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, context, Clocks.now)
        if not self._process.is_dead:
            self.ready.append(handle)
            self._process.wake()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        handle = Handle(callback, args, context, when)
        if not self._process.is_dead:
            self._process.world.add_timer(self._process, handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Handle:  # type: ignore[override]
        return self.call_at(Clocks.now + delay, callback, *args, context=context)

    def run_turn(self) -> None:
        """Run what is ready now."""
        ready = self.ready
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle.is_cancelled:
                continue
            try:
                handle.run()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"exception in {handle}", "exception": error})
            if self._process.is_dead:
                return

    # Futures and tasks

    def _number(self) -> int:
        self._objects += 1
        return self._objects

    def create_future(self) -> Future:
        future = Future(loop=self)
        future.number = self._number()
        return future

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None) -> Task:  # type: ignore[override]
        task = Task.__new__(Task)
        task.number = self._number()
        task.__init__(coro, loop=self, name=name or f"task-{task.number}", context=context)  # type: ignore[misc]
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # A killed process leaves its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Future:  # type: ignore[override]
        """Run the job at a later time, on the loop itself."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except BaseException as error:
                future.set_exception(error)

        self.call_later(self._process.world.random.uniform(0, EXECUTOR_S_MAX), run)
        return future

    # Sockets

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        endpoint = await self._network.connect(self._process, (host, port))
        return _attached(endpoint, protocol_factory())

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:
        return _attached(sock.detach(), protocol_factory())

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        return Server(self._network, sock.detach_listener(), protocol_factory)

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        fd.set_reader(lambda: callback(*args))

    def remove_reader(self, fd: Any) -> bool:
        return bool(fd.set_reader(None))

    # The rest

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self._process.is_dead

    def get_debug(self) -> bool:
        return False

    def get_exception_handler(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._process.world.on_exception(self._process, context)


def _attached(endpoint: Endpoint, protocol: Any) -> tuple[Transport, Any]:
    return Transport(endpoint, protocol), protocol
