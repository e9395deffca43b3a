"""The caller's side of the engine: who waits for which request, and errors that nobody has met yet."""

import logging
import threading
from collections.abc import Sequence
from queue import Empty, Queue
from weakref import WeakMethod

from .._fake.engine import Cancel, Engine, Quit
from .._fake.faults import RELEASE, Faults
from .._fake.model import Model
from ..llmapi.llm_args import TorchLlmArgs
from .request import GenerationRequest, Response
from .result import GenerationResult
from .utils import RequestError, notify_many

_log = logging.getLogger("tensorrt_llm")


class Dispatcher:
    """Hands out the engine's responses. A result that never gets its last one is never forgotten."""

    def __init__(self) -> None:
        self.results: dict[int, GenerationResult] = {}
        self.errors: Queue[Exception] = Queue()

    def dispatch(self, responses: Sequence[Response]) -> None:
        """One wake-up for all responses of a step."""
        queues = []
        for response in responses:
            result = self.results.get(response.id)
            if result is None:
                continue
            if response.is_final or response.error is not None:
                del self.results[response.id]
            if result.aqueue is None:
                result.queue.put(response)
            else:
                result.aqueue.put(response)
                queues.append(result.aqueue)
        notify_many(queues)


class GenerationExecutorProxy:
    """Starts the engine when it is made."""

    def __init__(self, args: TorchLlmArgs, model: Model, faults: Faults) -> None:
        self._dispatcher = Dispatcher()
        self._faults = faults
        self._decoder = None if args.skip_tokenizer_init else model.vocabulary
        self._is_shutdown = False
        self._id_count = 0
        self._engine = Engine(args, model, faults, self._dispatcher.dispatch, self._dispatcher.errors.put)
        self._engine.start()

    def next_id(self) -> int:
        self._id_count += 1
        return self._id_count

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Raises an error of the engine's that nobody has met yet, after a shutdown."""
        result = GenerationResult(request, WeakMethod(self._handle_background_error), self, self._decoder)
        self._dispatcher.results[request.id] = result
        self._engine.inbox.put(request)
        self._handle_background_error()
        return result

    def abort_request(self, request_id: int) -> None:
        if request_id not in self._dispatcher.results:
            _log.warning("Request %d is finished, cannot abort it", request_id)
            return
        self._engine.inbox.put(Cancel(request_id))

    def is_shutdown(self) -> bool:
        return self._is_shutdown

    def shutdown(self) -> None:
        """Abort all, tell the engine to quit, and wait for it without a bound."""
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
        """A text is one request's failure. Anything else is the engine's, and shuts it down on the caller's thread."""
        if isinstance(error, str):
            raise RequestError(error)
        if error is None:
            try:
                error = self._dispatcher.errors.get_nowait()
            except Empty:
                return
        self.shutdown()
        raise error
