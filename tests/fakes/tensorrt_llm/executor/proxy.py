"""The caller's side of the engine: dispatches responses to results, and keeps errors until a call raises them."""

import logging
import threading
from collections.abc import AsyncIterable, Sequence
from queue import Empty, Queue
from typing import Any
from weakref import WeakMethod

from .._fake.engine import Cancel, Engine, Quit
from .._fake.faults import RELEASE, Faults
from .._fake.model import Model
from ..llmapi.llm_args import TorchLlmArgs
from .request import GenerationRequest, Response
from .result import GenerationResult, IterationResult
from .utils import RequestError, notify_many

_log = logging.getLogger("tensorrt_llm")


class Dispatcher:
    """Dispatches the engine's responses. A result without a last response is never removed.

    `stats`, `events`: created with the first request; earlier reports are lost.
    """

    def __init__(self) -> None:
        self.results: dict[int, GenerationResult] = {}
        self.errors: Queue[Exception] = Queue()
        self.stats: IterationResult | None = None
        self.events: IterationResult | None = None

    def fail(self, error: Exception) -> None:
        self.errors.put(error)

    def report(self, stats: Sequence[str], events: Sequence[str]) -> None:
        for result, lines in ((self.stats, stats), (self.events, events)):
            if result is not None:
                result.put(lines)

    def start_reports(self) -> None:
        """Called for each request: there may be reports to read again."""
        self.stats = self.stats or IterationResult()
        self.events = self.events or IterationResult()
        self.stats.mark_undone()
        self.events.mark_undone()

    def dispatch(self, responses: Sequence[Response]) -> None:
        """Deliver the responses of a step with one wake-up."""
        queues = []
        for response in responses:
            result = self.results.get(response.id)
            if result is None:
                continue
            if response.is_final or response.error is not None:
                del self.results[response.id]
            result.queue.put(response)
            if result.aqueue is not None:
                queues.append(result.aqueue)
        notify_many(queues)


class _NoStats:
    """An iterator without statistics."""

    def __aiter__(self) -> "_NoStats":
        return self

    async def __anext__(self) -> dict[str, Any]:
        raise StopAsyncIteration


class GenerationExecutorProxy:
    """The caller's handle of the engine, which the constructor starts."""

    def __init__(self, args: TorchLlmArgs, model: Model, faults: Faults) -> None:
        self._dispatcher = Dispatcher()
        self._faults = faults
        self._decoder = None if args.skip_tokenizer_init else model.vocabulary
        self._is_shutdown = False
        self._id_count = 0
        self._engine = Engine(args, model, faults, self._dispatcher)
        self._engine.start()

    def next_id(self) -> int:
        self._id_count += 1
        return self._id_count

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Submit a request. If the engine has an error that no call has raised yet, shuts down and raises it."""
        result = GenerationResult(request, WeakMethod(self._handle_background_error), self, self._decoder)
        self._dispatcher.results[request.id] = result
        self._dispatcher.start_reports()
        self._engine.inbox.put(request)
        self._handle_background_error()
        return result

    def abort_request(self, request_id: int) -> None:
        if request_id not in self._dispatcher.results:
            _log.warning("Request %d is finished, cannot abort it", request_id)
            return
        self._engine.inbox.put(Cancel(request_id))

    def get_stats(self, timeout: float) -> list[dict[str, Any]]:
        result = self._dispatcher.stats
        if result is None:
            _log.warning("Iteration statistics are not available yet")
            return []
        result.set_timeout(timeout)
        return result.get_results()

    def aget_stats(self, timeout: float) -> AsyncIterable[dict[str, Any]]:
        result = self._dispatcher.stats
        if result is None:
            _log.warning("Iteration statistics are not available yet")
            return _NoStats()
        result.set_timeout(timeout)
        return result

    def get_kv_events(self, timeout: float) -> list[dict[str, Any]]:
        return self._kv_events(timeout).get_results()

    def aget_kv_events(self, timeout: float) -> AsyncIterable[dict[str, Any]]:
        return self._kv_events(timeout)

    def _kv_events(self, timeout: float) -> IterationResult:
        result = self._dispatcher.events
        assert result is not None, "KV Event Manager has not been initialized: submit a request first"
        result.set_timeout(timeout)
        return result

    def is_shutdown(self) -> bool:
        return self._is_shutdown

    def shutdown(self) -> None:
        """Abort all requests, tell the engine to quit, and wait for it without a bound."""
        if self._is_shutdown:
            return
        self._is_shutdown = True
        for request_id in list(self._dispatcher.results):
            self.abort_request(request_id)
        self._engine.inbox.put(Quit())
        if threading.current_thread() is not self._engine:
            self._engine.join()
        if self._faults.shutdown == "hangs":
            RELEASE.wait()

    def _handle_background_error(self, error: Exception | str | None = None) -> None:
        """Raise an error. A text is the failure of one request; any other error shuts the engine down first."""
        if isinstance(error, str):
            raise RequestError(error)
        if error is None:
            try:
                error = self._dispatcher.errors.get_nowait()
            except Empty:
                return
        self.shutdown()
        raise error
