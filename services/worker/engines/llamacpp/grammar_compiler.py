"""Compiles grammars in threads: most take a millisecond, but a hostile one takes minutes and cannot be interrupted.

Each grammar is compiled in its own thread, so neither the engine nor the event loop waits for it. A compilation that is
not done in time fails; its thread runs on, and counts towards THREADS_MAX until it ends.
"""

import asyncio
import threading
from collections.abc import Callable

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid
from services.core.request import Request
from services.worker.engines.llamacpp.grammar import Grammar, GrammarBuilder

log = structlog.get_logger()

COMPILE_S_MAX = 5.0
"""How long a compilation may take, including the wait for a thread."""
THREADS_MAX = 4
WAITING_MAX = 1024

Done = Callable[[Grammar | Failure], None]


class Compilation:
    """One grammar that is being compiled. `done` is called once, with the first result, unless it is dropped."""

    def __init__(self, request: Request, done: Done) -> None:
        self.request = request
        self.is_started = False
        self._done: Done | None = done

    def complete(self, result: Grammar | Failure) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)

    def drop_callback(self) -> None:
        """From now on, `done` is not called."""
        self._done = None


class GrammarCompiler:
    """Compiles grammars in at most THREADS_MAX threads. Its methods are called on the event loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, grammars: GrammarBuilder) -> None:
        self._loop = loop
        self._grammars = grammars
        self._waiting: dict[Compilation, asyncio.TimerHandle] = {}  # Oldest first.
        self._thread_count = 0

    def compile(self, request: Request, done: Done) -> Compilation:
        """Compile the grammar of a guided request, advanced over the tokens that it already has.

        `done` is called once, on the loop, within COMPILE_S_MAX.

        Raises Failure(WORKER_AT_CAPACITY) if WAITING_MAX compilations wait for a thread.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise _full()
        compilation = Compilation(request, done)
        self._waiting[compilation] = self._loop.call_later(COMPILE_S_MAX, self._expire, compilation)
        self._start_threads()
        return compilation

    def cancel(self, compilation: Compilation) -> None:
        """Do not call `done`. A compilation that waits is never started; one that has started runs to its end."""
        timer = self._waiting.pop(compilation, None)
        if timer is not None:
            timer.cancel()
        compilation.drop_callback()

    def _start_threads(self) -> None:
        while self._waiting and self._thread_count < THREADS_MAX:
            compilation = next(iter(self._waiting))
            timer = self._waiting.pop(compilation)
            self._thread_count += 1
            compilation.is_started = True
            threading.Thread(target=self._work, args=(compilation, timer), name="llamacpp-grammar", daemon=True).start()

    def _work(self, compilation: Compilation, timer: asyncio.TimerHandle) -> None:
        """Run in the thread."""
        result = self._build(compilation.request)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, compilation, timer, result)

    def _build(self, request: Request) -> Grammar | Failure:
        assert request.guided is not None
        try:
            return self._grammars.build(request.guided, request.generated_token_ids)
        except Failure as failure:
            return failure
        except BaseException:  # A panic in Rust does not derive from Exception.
            log.exception("compiling a grammar failed")
            return Failure(Reason.ENGINE_ERROR, "the grammar of the guided request could not be compiled")

    def _end(self, compilation: Compilation, timer: asyncio.TimerHandle, result: Grammar | Failure) -> None:
        timer.cancel()
        self._thread_count -= 1
        compilation.complete(result)
        self._start_threads()

    def _expire(self, compilation: Compilation) -> None:
        self._waiting.pop(compilation, None)
        compilation.complete(_too_complex() if compilation.is_started else _full())


def _too_complex() -> Failure:
    return invalid("guided", f"guided is too complex: compiling it took more than {COMPILE_S_MAX:g} s; simplify it")


def _full() -> Failure:
    detail = "Server overloaded: too many grammars are being compiled"
    return Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.PREPARATION})
