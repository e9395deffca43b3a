"""Makes forms beside the engine: most take a millisecond, but a hostile one takes minutes, and cannot be interrupted.

So each is made in a thread of its own, that the engine and the event loop do not wait for. What is not ready in time
fails; its thread is left behind, and counts until it ends.
"""

import asyncio
import threading
from collections.abc import Callable

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor, invalid
from services.core.request import Request
from services.worker.engines.llamacpp.grammar import Form, Forms

log = structlog.get_logger()

FORM_S_MAX = 5.0
"""How long a form may take to be made, with the wait for a thread."""
THREADS_MAX = 4
WAITING_MAX = 1024

Done = Callable[[Form | Failure], None]


class Making:
    """One form on its way: `done` is called once, with what comes first."""

    def __init__(self, request: Request, done: Done) -> None:
        self.request = request
        self.is_started = False
        self._done: Done | None = done

    def end(self, result: Form | Failure) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(result)

    def forget(self) -> None:
        """Let `done` not be called any more."""
        self._done = None


class GrammarCompiler:
    """Used on the event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forms: Forms) -> None:
        self._loop = loop
        self._forms = forms
        self._waiting: dict[Making, asyncio.TimerHandle] = {}  # Oldest first.
        self._thread_count = 0

    def start(self, request: Request, done: Done) -> Making:
        """Make the form of a guided request as it stands; `done` is called once, on the loop, within FORM_S_MAX.

        Raises Failure(WORKER_AT_CAPACITY) when WAITING_MAX forms wait.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise _full()
        making = Making(request, done)
        self._waiting[making] = self._loop.call_later(FORM_S_MAX, self._expire, making)
        self._start_threads()
        return making

    def cancel(self, making: Making) -> None:
        """Nobody wants it any more: `done` is not called. One that waits is not begun; one under way goes on."""
        timer = self._waiting.pop(making, None)
        if timer is not None:
            timer.cancel()
        making.forget()

    def _start_threads(self) -> None:
        while self._waiting and self._thread_count < THREADS_MAX:
            making = next(iter(self._waiting))
            timer = self._waiting.pop(making)
            self._thread_count += 1
            making.is_started = True
            threading.Thread(target=self._work, args=(making, timer), name="llamacpp-form", daemon=True).start()

    def _work(self, making: Making, timer: asyncio.TimerHandle) -> None:
        """The thread."""
        result = self._make(making.request)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, making, timer, result)

    def _make(self, request: Request) -> Form | Failure:
        assert request.guided is not None
        try:
            return self._forms.start(request.guided, request.generated_token_ids)
        except Failure as failure:
            return failure
        except BaseException:  # A panic in Rust is no Exception.
            log.exception("making a form failed")
            return Failure(Reason.ENGINE_ERROR, "the form of a guided request could not be made")

    def _end(self, making: Making, timer: asyncio.TimerHandle, result: Form | Failure) -> None:
        timer.cancel()
        self._thread_count -= 1
        making.end(result)
        self._start_threads()

    def _expire(self, making: Making) -> None:
        self._waiting.pop(making, None)
        making.end(_too_complex() if making.is_started else _full())


def _too_complex() -> Failure:
    return invalid("guided", f"guided is too complex: it took more than {FORM_S_MAX:g} s to read; simplify it")


def _full() -> Failure:
    detail = "Server overloaded: too many forms are being made"
    return Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.PREPARATION})
