"""Runs requests on the engine: admission before it, one sink for each request behind it."""

import asyncio
from collections.abc import Sequence
from itertools import count
from typing import Any

import structlog

from services.errors import Failure, Reason
from services.layers import bug_failure
from services.request import Call, Delta, Finish, Request, Sink, Usage
from services.worker.dispatcher import Dispatcher, Limits
from services.worker.engine import Engine, Output

log = structlog.get_logger()


def _now() -> float:
    """The loop's time, in seconds."""
    return asyncio.get_running_loop().time()


class _Run:
    """One request on the engine: its sink, where its answer stands, and how it ends."""

    __slots__ = ("call", "ended", "position", "request", "sink")

    def __init__(self, request: Request, call: Call, sink: Sink) -> None:
        self.request = request
        self.call = call
        self.sink = sink
        self.position = len(request.generated_token_ids)
        self.ended: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def take(self, output: Output) -> None:
        if self.ended.done():
            return
        if output.token_ids:
            self.sink.deliver(
                Delta(self.position, output.token_ids, choice=self.request.choice, logprobs=output.logprobs)
            )
            self.position += len(output.token_ids)
        if output.failure is not None:
            self.fail(output.failure)
        elif output.finish is not None:
            usage = Usage(len(self.request.prompt_token_ids), self.position)
            self.ended.set_result(Finish(output.finish, usage))

    def fail(self, failure: Failure) -> None:
        if not self.ended.done():
            self.ended.set_exception(failure)


class Execute:
    """Innermost in the worker: below it there is only the engine.

    Positions count from the first token of the whole continuation, so a continued request starts behind what it brings.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.limits = limits
        self._engine = engine
        self._keys = count(1)
        self._runs: dict[int, _Run] = {}
        self._dispatcher = Dispatcher(limits, self._start, _now)
        self.refused_count = 0

    @property
    def running_count(self) -> int:
        return self._dispatcher.running_count

    @property
    def waiting_count(self) -> int:
        return self._dispatcher.waiting_count

    @property
    def service_time_s(self) -> float | None:
        """How long a request holds its slot, on average; None: none has ended so far."""
        return self._dispatcher.service_time_s

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        run, key = _Run(request, call, sink), next(self._keys)
        self._runs[key] = run
        try:
            self._dispatcher.admit(key)
            return await run.ended
        except Failure as failure:
            self.refused_count += failure.reason is Reason.WORKER_AT_CAPACITY
            raise
        finally:
            del self._runs[key]
            try:
                self._engine.cancel(key)  # First: whoever gets the slot must not find the engine full.
            finally:
                self._dispatcher.release(key)

    def emit(self, outputs: Sequence[Output]) -> None:
        """Take one step's outputs from the engine. A bug in what one request makes of them is that request's alone."""
        for output in outputs:
            run = self._runs.get(output.key)
            if run is None:
                continue
            try:
                run.take(output)
            except Exception as error:
                run.fail(bug_failure(error, run.call.request_id))

    def fail_all(self, failure: Failure) -> None:
        """The engine is gone: nothing that runs or waits can go on."""
        for run in self._runs.values():
            run.fail(failure)

    def _start(self, key: Any) -> None:
        run = self._runs[key]
        try:
            self._engine.submit(key, run.request)
            run.call.attempt.begin()
        except Failure as failure:
            run.fail(failure)
        except Exception:
            log.exception("the engine refused a request with an exception of its own")
            run.fail(Failure(Reason.ENGINE_ERROR, "the engine failed to start the request"))
