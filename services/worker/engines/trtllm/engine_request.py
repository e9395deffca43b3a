"""One request on the engine, from its submission until the engine is done with it.

| event | wanted | not wanted any more |
| --- | --- | --- |
| a result | what is new is emitted | its tokens are counted, and nothing else |
| the answer is over before the engine's last result | aborted, and waited for | – |
| cancel | aborted, and waited for | – |
| the engine's last result | the answer ends with it | it is forgotten |
| no last result in time | – | it is forgotten: the engine never says that it dropped one from its queue |
| RequestError | this request fails | it is forgotten |
| any other error | the engine is dead | the engine is dead |

After an error the result is never asked again: it would keep its reader waiting for ever. However a run ends, `abort`
has been called for it, unless the engine has said that it is finished or is dead.
"""

import asyncio
from typing import Any, Protocol

import structlog

from services.core.errors import Failure, Reason, invalid
from services.core.request import Request
from services.worker.engine import Output
from services.worker.engines.trtllm.result_cursor import ResultCursor

log = structlog.get_logger()

ERROR_CHARACTERS_MAX = 300


class Listener(Protocol):
    """Who is told of results."""

    def on_result(self, run: "EngineRequest", *, prefilled: int, drawn: int) -> None:
        """There is news. prefilled: tokens that the request brought and that are computed now; drawn: new tokens."""
        ...

    def on_output(self, run: "EngineRequest", output: Output) -> None:
        """For the client. With a finish or a failure it is the last."""
        ...


class EngineRequest:
    """See the module. result: of `generate_async`. rank: the data-parallel rank that it is on.

    heard_at: when the engine last said something of it, in the loop's time. has_begun: its prompt has been computed.
    """

    __slots__ = (
        "_abort_s",
        "_answer",
        "_is_aborted",
        "_leave_by",
        "_listener",
        "_loop",
        "_result",
        "_scope",
        "begun_at",
        "has_begun",
        "heard_at",
        "is_cancelled",
        "is_wanted",
        "key",
        "rank",
        "request",
    )

    def __init__(
        self, answer: ResultCursor, request: Request, result: Any, listener: Listener, *, rank: int, abort_s: float
    ) -> None:
        self.key = answer.key
        self.request = request
        self.rank = rank
        self.is_wanted = True
        self.has_begun = False
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self.begun_at = self.heard_at = self._loop.time()
        self._answer = answer
        self._result = result
        self._listener = listener
        self._abort_s = abort_s
        self._is_aborted = False
        self._leave_by: float | None = None
        self._scope: asyncio.Timeout | None = None

    @property
    def token_count(self) -> int:
        """Of prompt and answer so far: what it has in the key-value cache, or will have."""
        return self.request.token_count + self._answer.drawn

    @property
    def prefill_left(self) -> int:
        """Tokens that it brought, until there is news that they are computed."""
        return 0 if self.has_begun else self.request.token_count

    @property
    def drawn(self) -> int:
        """Tokens that the engine has drawn for it here."""
        return self._answer.drawn

    def cancel(self) -> None:
        """Its client wants it no more."""
        self.is_cancelled = True
        self.leave()

    def leave(self) -> None:
        """Nobody wants it any more: abort it, and give the engine `abort_s` to say that it has. Idempotent."""
        if not self.is_wanted:
            return
        self.is_wanted = False
        self._leave_by = self._loop.time() + self._abort_s
        if self._scope is not None:
            self._scope.reschedule(self._leave_by)
        self.abort()

    def abort(self) -> None:
        """Returns at once. Does nothing for one that has finished, or whose engine is gone. Idempotent."""
        if self._result.finished or self._is_aborted:
            return
        self._is_aborted = True
        try:
            self._result.abort()
        except Exception as error:  # The executor is gone: there is nothing left to abort.
            log.debug("a request could not be aborted", key=self.key, why=str(error))

    def fail(self, failure: Failure) -> None:
        """End it from here."""
        self._end(Output(self.key, failure=failure))

    async def follow(self, request_error: type[Exception]) -> None:
        """Read its results to the end. Raises whatever the engine died of."""
        try:
            await self._read()
        except TimeoutError:
            if self._leave_by is None:
                raise
            log.debug("nothing was heard of a request that was aborted", key=self.key)
        except StopAsyncIteration:
            self._end(Output(self.key, failure=_ended_early()))
        except request_error as error:
            self._end(Output(self.key, failure=self._failure_of(error)))

    async def _read(self) -> None:
        """To the engine's last result, or until `leave` lets the time be over. Raises TimeoutError then."""
        async with asyncio.timeout_at(self._leave_by) as scope:
            self._scope = scope
            try:
                while not self._result.finished:
                    await anext(self._result)
                    self._take()
            finally:
                self._scope = None

    def _take(self) -> None:
        self.heard_at = self._loop.time()
        completion = self._result.outputs[0]
        before, output = self.drawn, None
        if self.is_wanted:
            output = self._answer.take(completion, is_finished=self._result.finished)
        else:
            self._answer.skip(completion)
        drawn = self.drawn - before
        self._listener.on_result(self, prefilled=self._prefilled(has_news=output is not None or drawn > 0), drawn=drawn)
        if output is not None:
            self._pass(output)

    def _prefilled(self, *, has_news: bool) -> int:
        """What the engine has computed of what the request brought, once: before its first token or end."""
        if self.has_begun or not has_news:
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
        why = str(error)[:ERROR_CHARACTERS_MAX]
        if self.request.guided is not None and not self.has_begun:
            return invalid("guided", f"guided.{self.request.guided.kind} cannot be used: {why}")
        return Failure(Reason.ENGINE_ERROR, f"TensorRT-LLM failed on this request: {why}")


def _ended_early() -> Failure:
    return Failure(Reason.ENGINE_ERROR, "TensorRT-LLM ended the answer without saying so")
