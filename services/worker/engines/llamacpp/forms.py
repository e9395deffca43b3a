"""Makes forms beside the engine: most take a millisecond, but a hostile one takes minutes, and cannot be interrupted.

So each is made in a thread of its own, that the engine and the event loop do not wait for. What is not ready in time
fails; its thread is left behind, and counts until it ends.
"""

import asyncio
import threading
from collections.abc import Callable

import structlog

from services.errors import Failure, Reason, invalid
from services.guided import Form, Forms
from services.request import Request

log = structlog.get_logger()

FORM_S_MAX = 5.0
"""How long a form may take to be made."""
THREADS_MAX = 4

Done = Callable[[Form | Failure], None]


class FormMaker:
    """Used on the event loop alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, forms: Forms) -> None:
        self._loop = loop
        self._forms = forms
        self._thread_count = 0

    def start(self, request: Request, done: Done) -> None:
        """Make the form of a guided request as it stands; `done` is called once, on the loop, within FORM_S_MAX.

        Raises Failure(WORKER_AT_CAPACITY) while THREADS_MAX forms are in the making.
        """
        if self._thread_count >= THREADS_MAX:
            raise Failure(Reason.WORKER_AT_CAPACITY, "Server overloaded: too many forms are being made")
        self._thread_count += 1
        making = _Making(self._loop, done)
        threading.Thread(target=self._work, args=(request, making), name="llamacpp-form", daemon=True).start()

    def _work(self, request: Request, making: "_Making") -> None:
        result = self._make(request)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end, making, result)

    def _make(self, request: Request) -> Form | Failure:
        assert request.guided is not None
        try:
            return self._forms.start(request.guided, request.generated_token_ids)
        except Failure as failure:
            return failure
        except Exception:
            log.exception("making a form failed")
            return Failure(Reason.ENGINE_ERROR, "the form of a guided request could not be made")

    def _end(self, making: "_Making", result: Form | Failure) -> None:
        self._thread_count -= 1
        making.end(result)


class _Making:
    """One form: ends with its result or in time, whichever is first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, done: Done) -> None:
        self._done = done
        self._is_over = False
        late = invalid("guided", f"guided is too complex: it took more than {FORM_S_MAX:g} s to read; simplify it")
        self._timer = loop.call_later(FORM_S_MAX, self.end, late)

    def end(self, result: Form | Failure) -> None:
        self._timer.cancel()
        if not self._is_over:
            self._is_over = True
            self._done(result)
