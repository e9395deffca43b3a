"""The results that a caller iterates over: the same object in all iterations, modified by each."""

import asyncio
import json
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Protocol

from .request import GenerationRequest, Logprob, LogprobResults, Response
from .utils import AsyncQueue, has_event_loop, notify_many

if TYPE_CHECKING:
    from .proxy import GenerationExecutorProxy

__all__ = ["CompletionOutput", "GenerationResult", "IterationResult", "Logprob"]

ErrorHandler = Callable[[Exception | str | None], None]


class Decoder(Protocol):
    """The part of a tokeniser that is used here."""

    def decode(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class CompletionOutput:
    """One answer. Its lists are cumulative; each `*_diff` has the additions of the last response *for this answer*."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: LogprobResults = field(default_factory=list)
    prompt_logprobs: LogprobResults = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: object | None = None
    disaggregated_params: object | None = None
    request_perf_metrics: object | None = None
    _last_text_len: int = field(default=0, init=False, repr=False)
    _last_token_ids_len: int = field(default=0, init=False, repr=False)
    _last_logprobs_len: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> LogprobResults:
        return self.logprobs[self._last_logprobs_len :]

    def _update(self, response: Response, decoder: Decoder | None) -> None:
        self._last_token_ids_len = len(self.token_ids)
        self.token_ids.extend(response.token_ids)
        if response.logprobs is not None:
            self._last_logprobs_len = len(self.logprobs)
            self.logprobs = [*self.logprobs, *response.logprobs]
            likeliest = (next(iter(one.values())).logprob for one in response.logprobs)
            self.cumulative_logprob = sum(likeliest, self.cumulative_logprob or 0.0)
        self.finish_reason = response.finish or self.finish_reason
        self.stop_reason = response.stop_reason
        if response.cut_count:
            self.token_ids = self.token_ids[: -response.cut_count]
        if decoder is not None:
            self._last_text_len = len(self.text)
            self.text = decoder.decode(self.token_ids)


class GenerationResult:
    """The answers to one request.

    A result created on an event loop can be iterated on that loop only; one created without a loop cannot be iterated.
    """

    def __init__(
        self,
        request: GenerationRequest,
        background_error_handler: "weakref.WeakMethod[ErrorHandler]",
        executor: "GenerationExecutorProxy",
        decoder: Decoder | None,
    ) -> None:
        self.aqueue: AsyncQueue[Response] | None = AsyncQueue() if has_event_loop() else None
        self.queue: Queue[Response] = Queue() if self.aqueue is None else self.aqueue.sync_q
        self.sampling_params = request.sampling_params
        self.prompt: str | None = None
        self.decoding_iter = 0
        self.cached_tokens = 0
        self.metrics_dict: dict[str, float] = {}
        self.disaggregated_params: object | None = None
        self.context_logits: object | None = None
        self._generation_request = request
        self._decoder = decoder if request.sampling_params.detokenize else None
        self._background_error_handler = background_error_handler
        self._executor = weakref.ref(executor)
        self._outputs = [CompletionOutput(index) for index in range(request.sampling_params.best_of or 1)]
        self._done = False
        self._aborted = False

    @property
    def request_id(self) -> int:
        return self._generation_request.id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._generation_request.prompt_token_ids

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The `n` likeliest of the `best_of` answers."""
        if self.sampling_params.n == len(self._outputs):
            return self._outputs
        ranked = sorted(self._outputs, key=lambda output: output.cumulative_logprob or 0.0, reverse=True)
        for index, output in enumerate(ranked):
            output.index = index
        return ranked[: self.sampling_params.n]

    @property
    def finished(self) -> bool:
        """Whether the request has ended. Stays False after a RequestError."""
        return self._done

    def abort(self) -> None:
        """Ask the engine to stop, without waiting. Raises AttributeError if the executor no longer exists."""
        executor: Any = self._executor()
        executor.abort_request(self.request_id)
        self._aborted = True

    def aborted(self) -> bool:
        return self._aborted

    def result(self, timeout: float | None = None) -> "GenerationResult":
        """Wait for the end of the request. The timeout is ignored."""
        del timeout
        while not self._done:
            self._handle_response(self.queue.get())
        return self

    async def aresult(self) -> "GenerationResult":
        while not self._done:
            await self._aresult_step()
        return self

    def __await__(self) -> "Generator[Any, None, GenerationResult]":
        return self.aresult().__await__()

    def __aiter__(self) -> "GenerationResult":
        return self

    async def __anext__(self) -> "GenerationResult":
        if self._done:
            raise StopAsyncIteration
        await self._aresult_step()
        return self

    def __hash__(self) -> int:
        return hash(self.request_id)

    def __eq__(self, other: object) -> bool:
        return self is other

    async def _aresult_step(self) -> None:
        assert self.aqueue is not None, "The asyncio event loop was not present during initialization"
        self._handle_response(await self.aqueue.get())

    def _handle_response(self, response: Response) -> None:
        """Raise RequestError if the request has failed, or an error of the engine that no call has raised yet."""
        handler = self._background_error_handler()
        if response.error is not None:
            if handler is not None:
                handler(response.error)
            return
        self._done = response.is_final
        self.decoding_iter = response.decoding_iter
        self.cached_tokens = response.cached_tokens
        self._outputs[response.sequence_index]._update(response, self._decoder)
        if handler is not None:
            handler(None)


class IterationResult:
    """A queue of statistics or cache events. Reading removes them; iteration ends after `timeout` silent seconds."""

    def __init__(self) -> None:
        self.aqueue: AsyncQueue[str] | None = AsyncQueue() if has_event_loop() else None
        self.queue: Queue[str] = Queue() if self.aqueue is None else self.aqueue.sync_q
        self._timeout = 2.0
        self._done = False

    def put(self, lines: Sequence[str]) -> None:
        """Called in the engine's thread."""
        for line in lines:
            self.queue.put(line)
        if self.aqueue is not None:
            notify_many([self.aqueue])

    def set_timeout(self, timeout: float) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        """Called when a request is submitted."""
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        results = []
        while not self._done:
            try:
                results.append(json.loads(self.queue.get(timeout=self._timeout)))
            except Empty:
                self._done = True
        return results

    def __aiter__(self) -> "IterationResult":
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        assert self.aqueue is not None, "The asyncio event loop was not present during initialization"
        try:
            async with asyncio.timeout(self._timeout):  # Before Python 3.12, wait_for may lose a cancellation.
                content: dict[str, Any] = json.loads(await self.aqueue.get())
        except TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return content
