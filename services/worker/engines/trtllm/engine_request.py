"""One request on the engine, from its submission until the engine is done with it.

| event | while wanted | no longer wanted |
| --- | --- | --- |
| a result | its new tokens are emitted | its new tokens are only counted |
| the answer ends before the engine's last result | abort, and wait for the last result | – |
| cancel | abort, and wait for the last result | – |
| the engine's last result | the answer ends with it | the request is removed |
| no last result in time | – | removed: the engine never reports a request that it drops from its queue |
| RequestError | this request fails | the request is removed |
| any other error | the engine is dead | the engine is dead |

After an error the result is not read again: it would block its reader for ever. `abort` is called for every request
that ends, unless the engine has reported that the request is finished, or is dead.
"""

import asyncio
from typing import Any, Protocol

import structlog

from services.core.errors import Failure, Reason
from services.core.request import Request
from services.worker.engine import Output
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.guided.explain import failing
from services.worker.guided.refusals import unusable

log = structlog.get_logger()

ERROR_CHARACTERS_MAX = 300


class Listener(Protocol):
    """Callbacks for the results of a request."""

    def on_result(self, active: "EngineRequest", *, prefilled: int, drawn: int) -> None:
        """The engine sent a result. `prefilled`: prompt tokens that are now computed. `drawn`: new tokens."""
        ...

    def on_output(self, active: "EngineRequest", output: Output) -> None:
        """There is an output for the client. One with a finish or a failure is the last."""
        ...


class EngineRequest:
    """One request on the engine; the module docstring has its states and events.

    `result`: the result of `generate_async`. `rank`: its data-parallel rank. `last_result_at`: when the last result
    arrived, in event-loop time. `has_begun`: its prompt has been computed.
    """

    __slots__ = (
        "_abort_s",
        "_cursor",
        "_is_aborted",
        "_leave_by",
        "_listener",
        "_loop",
        "_result",
        "_scope",
        "begun_at",
        "has_begun",
        "is_cancelled",
        "is_wanted",
        "key",
        "last_result_at",
        "rank",
        "request",
    )

    def __init__(
        self, cursor: ResultCursor, request: Request, result: Any, listener: Listener, *, rank: int, abort_s: float
    ) -> None:
        self.key = cursor.key
        self.request = request
        self.rank = rank
        self.is_wanted = True
        self.has_begun = False
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self.begun_at = self.last_result_at = self._loop.time()
        self._cursor = cursor
        self._result = result
        self._listener = listener
        self._abort_s = abort_s
        self._is_aborted = False
        self._leave_by: float | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def token_count(self) -> int:
        """Tokens of prompt and answer so far: those that are, or will be, in the key-value cache."""
        return self.request.token_count + self._cursor.drawn

    @property
    def prefill_left(self) -> int:
        """Prompt tokens that are not computed yet, as far as the engine's results tell."""
        return 0 if self.has_begun else self.request.token_count

    @property
    def drawn(self) -> int:
        """Tokens that this engine has drawn for the request."""
        return self._cursor.drawn

    def cancel(self) -> None:
        """Abort the request at its client's wish."""
        self.is_cancelled = True
        self.leave()

    def leave(self) -> None:
        """Mark the request as no longer wanted, abort it, and give the engine `abort_s` for the last result.

        Idempotent.
        """
        if not self.is_wanted:
            return
        self.is_wanted = False
        self._leave_by = self._loop.time() + self._abort_s
        if self._scope is not None:
            self._scope.reschedule(self._leave_by)
        self.abort()

    def abort(self) -> None:
        """Ask the engine to abort the request, without waiting. Does nothing if it has finished. Idempotent."""
        if self._result.finished or self._is_aborted:
            return
        self._is_aborted = True
        try:
            self._result.abort()
        except Exception as error:  # The executor has shut down, so there is nothing to abort.
            log.debug("aborting a request failed", key=self.key, why=str(error))

    def fail(self, failure: Failure) -> None:
        """End the request with this failure."""
        self._end(Output(self.key, failure=failure))

    async def follow(self, request_error: type[Exception]) -> None:
        """Read the results to the end. Raises the error that the engine died of."""
        try:
            await self._read()
        except TimeoutError:
            if self._leave_by is None:
                raise
            log.debug("no last result for an aborted request", key=self.key)
        except StopAsyncIteration:
            self._end(Output(self.key, failure=_ended_early()))
        except request_error as error:
            self._end(Output(self.key, failure=self._failure_of(error)))

    async def _read(self) -> None:
        """Read until the engine's last result. Raises TimeoutError if it does not come in time after `leave`."""
        async with asyncio.timeout_at(self._leave_by) as scope:
            self._scope = scope
            try:
                while not self._result.finished:
                    await anext(self._result)
                    self._read_result()
            finally:
                self._scope = None

    def _read_result(self) -> None:
        self.last_result_at = self._loop.time()
        completion = self._result.outputs[0]
        before, output = self.drawn, None
        if self.is_wanted:
            output = self._cursor.read(completion, is_finished=self._result.finished)
        else:
            self._cursor.skip(completion)
        drawn = self.drawn - before
        self._listener.on_result(
            self, prefilled=self._prefilled(is_progress=output is not None or drawn > 0), drawn=drawn
        )
        if output is not None:
            self._pass(output)

    def _prefilled(self, *, is_progress: bool) -> int:
        """The prompt tokens that the engine has computed; reported once, before the first token or the end."""
        if self.has_begun or not is_progress:
            return 0
        self.has_begun = True
        return max(0, self.request.token_count - int(self._result.cached_tokens or 0))

    def _pass(self, output: Output) -> None:
        if output.finish is None and output.failure is None:
            self._listener.on_output(self, output)
        else:
            self._end(output)

    def _end(self, output: Output) -> None:
        if self.is_wanted:
            self.leave()
            self._listener.on_output(self, output)

    def _failure_of(self, error: Exception) -> Failure:
        if self.request.guided is not None and not self.has_begun:
            return unusable(self.request.guided.kind, failing(error, "TensorRT-LLM"))
        why = str(error)[:ERROR_CHARACTERS_MAX]
        return Failure(Reason.ENGINE_ERROR, f"TensorRT-LLM failed on this request: {why}")


def _ended_early() -> Failure:
    return Failure(Reason.ENGINE_ERROR, "TensorRT-LLM ended the answer without a last result")
