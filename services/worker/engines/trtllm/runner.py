"""A loaded engine at work: starts requests, emits their results, and watches whether the engine is alive.

| failure | consequence |
| --- | --- |
| RequestError | the engine has to make a token: if it does, this request fails; if not, all requests move elsewhere |
| the engine rejects a request (TypeError, ValueError) | the request fails, and the engine has to make a token |
| no result for one request while others continue | this request fails, and is aborted |
| any other exception, of any call | the engine is dead |
| no token of the whole engine: see health.py | the engine is dead |
| a guided form crashes a helper process, or exceeds its bounds | the request fails; the engine never gets it |
| the event loop is blocked: see shutdown.py | the process ends |

A dead engine stays dead: `run` raises, every request fails with ENGINE_DEAD and continues elsewhere, and the process
ends with exit status 1.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor
from services.core.request import FinishReason, Request
from services.runtime.tasks import root_cause
from services.worker.engine import Emit, EngineLoad, Output
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.engine_request import ERROR_CHARACTERS_MAX, EngineRequest
from services.worker.engines.trtllm.health import Canary, Health
from services.worker.engines.trtllm.load import Counts, Sample, emptiest_rank, rank_loads, read_stats, sample_of
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.engines.trtllm.sampling_params import ModelFacts, generate_arguments, tokens_left
from services.worker.engines.trtllm.shutdown import LoopWatch, begin_shutdown, shut_down
from services.worker.engines.trtllm.step_buffer import StepBuffer
from services.worker.guided.trials import Trials

log = structlog.get_logger()

LEAVING_MAX = 4096
"""How many aborted requests may wait for their last result at a time; above it, new requests are refused."""
SILENCE_CHECK_S = 1.0
"""Interval of the check for requests without results."""


class Runner:
    """Runs requests on a loaded engine. `run` is called once, on the event loop that the runner was created on."""

    def __init__(
        self, client: Client, config: TrtLlmConfig, facts: ModelFacts, emit: Emit, trials: Trials | None = None
    ) -> None:
        self._client = client
        self._trials = trials
        self._trying: dict[int, asyncio.Task[None]] = {}  # By key: guided requests that the engine does not know yet.
        self._config = config
        self._facts = facts
        self._loop = asyncio.get_running_loop()
        self._group: asyncio.TaskGroup | None = None
        self._steps = StepBuffer(emit, self._count_step)
        self._canary = Canary(client, facts, config.abort_s, self._on_engine_result, lambda: self._death is not None)
        self._health = Health(config, self._canary.ask, lambda: bool(self._live))
        self._death: Failure | None = None
        self._has_died = asyncio.Event()
        self._live: dict[int, EngineRequest] = {}  # By key: requests that may emit.
        self._leaving: set[EngineRequest] = set()
        self._held_failures: dict[int, Output] = {}  # By key: not emitted until a token proves that the engine lives.
        self._counts = Counts()
        self._sample: Sample | None = None

    async def run(self, ready: asyncio.Event) -> None:
        """Run until cancelled. Raises ENGINE_DEAD."""
        with LoopWatch(self._config.loop_s):  # Around all calls into the engine, including the first and the last.
            await self._work(ready)

    async def _work(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._warm_up()
                self._start_watching(self._group)
                ready.set()
                await self._has_died.wait()
                assert self._death is not None, "it is set before the event"
                raise self._death
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            await self._end()

    async def _warm_up(self) -> None:
        """Make the first token: the engine reports its cache only after one. Raises ENGINE_DEAD."""
        try:
            async with asyncio.timeout(self._config.warm_up_s):
                await self._canary.ask()
                self._health.note_result()
        except Exception as error:
            why = "timed out" if isinstance(error, TimeoutError) else _why(error)
            raise Failure(Reason.ENGINE_DEAD, f"TensorRT-LLM cannot make a token: {why}") from error

    def _start_watching(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._watch_health())
        group.create_task(self._watch_silent())
        if self._trials is not None:
            group.create_task(self._trials.load())
        if self._config.has_stats:
            group.create_task(read_stats(self._client.llm, self._record_stats, self._health.doubt))

    async def _end(self) -> None:
        """Shut the engine down. A dead one is not waited for, because its requests wait to continue elsewhere."""
        if self._death is None:
            await shut_down(self._client.llm, self._config.shutdown_s)
        else:
            begin_shutdown(self._client.llm)

    # Requests

    def submit(self, key: int, request: Request) -> None:
        """See Engine. Also raises ENGINE_DEAD."""
        self._check_room()
        if tokens_left(request, self._facts.context_length) == 0:
            self._steps.add(Output(key, finish=FinishReason.LENGTH))
        elif request.guided is None or self._trials is None:
            self._start_request(key, request)
        else:
            assert self._group is not None, "the engine is not ready"
            given = generate_arguments(request, self._facts).guided
            assert given is not None, "the request is guided"
            self._trying[key] = self._group.create_task(self._try(self._trials, key, request, given))

    async def _try(self, trials: Trials, key: int, request: Request, given: Mapping[str, Any]) -> None:
        """Start a guided request once a helper process has compiled its form: in the engine, a crash is everybody's."""
        assert request.guided is not None, "only guided requests are tried"
        try:
            await trials.check(request.guided.kind, given)
            del self._trying[key]
            self._check_room()
            self._start_request(key, request)
        except Failure as failure:
            self._trying.pop(key, None)
            self._steps.add(Output(key, failure=failure))

    def _start_request(self, key: int, request: Request) -> None:
        if not self._live:
            self._health.note_request()
        rank = emptiest_rank(self._live.values(), self._config.rank_count)
        result = self._start(request, rank)
        cursor = ResultCursor(key, request, self._facts)
        active = EngineRequest(cursor, request, result, self, rank=rank, abort_s=self._config.abort_s)
        self._live[key] = active
        assert self._group is not None, "the engine is not ready"
        self._group.create_task(self._follow(active))

    def cancel(self, key: int) -> None:
        """See Engine."""
        self._steps.forget(key)
        if (trying := self._trying.pop(key, None)) is not None:
            trying.cancel()
        self._held_failures.pop(key, None)
        active = self._live.pop(key, None)
        if active is not None:
            self._leaving.add(active)
            active.cancel()

    def _check_room(self) -> None:
        if self._death is not None:
            raise self._death.copy()
        if len(self._live) + len(self._trying) >= self._config.max_batch_size or len(self._leaving) >= LEAVING_MAX:
            detail = "Server overloaded: worker at capacity"
            raise Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.CAPACITY})

    def _start(self, request: Request, rank: int) -> Any:
        """Start the request and return its result. Raises ENGINE_ERROR if the request may be at fault, or ENGINE_DEAD.

        A request may be at fault if the engine raises a RequestError, TypeError or ValueError.
        """
        try:
            return self._client.start(request, rank)
        except Failure:
            raise
        except (self._client.request_error, TypeError, ValueError) as error:
            self._health.doubt()  # The error that an engine died of may have any of these classes.
            detail = f"TensorRT-LLM refused this request: {str(error)[:ERROR_CHARACTERS_MAX]}"
            raise Failure(Reason.ENGINE_ERROR, detail) from error
        except Exception as error:
            raise self._die(error) from error

    async def _follow(self, active: EngineRequest) -> None:
        try:
            await active.follow(self._client.request_error)
        except asyncio.CancelledError:
            if self._death is None:  # A call into a dead engine may not return.
                active.abort()
            raise
        except Exception as error:
            self._die(error)
        finally:
            self._live.pop(active.key, None)
            self._leaving.discard(active)

    def on_result(self, active: EngineRequest, *, prefilled: int, drawn: int) -> None:
        """See engine_request.Listener."""
        self._on_engine_result(drawn)
        self._counts.prefill_tokens += prefilled
        self._counts.generated_tokens += drawn
        if active.is_cancelled:
            self._counts.tokens_after_cancel += prefilled + drawn

    def _on_engine_result(self, drawn: int) -> None:
        """The engine sent a result of any request, the canary included. `drawn`: new tokens in it."""
        self._steps.step_soon()
        self._health.note_result()
        if drawn:
            self._emit_held_failures()

    def on_output(self, active: EngineRequest, output: Output) -> None:
        """See engine_request.Listener."""
        if output.failure is None:
            self._steps.add(output)
        else:
            self._held_failures[active.key] = output
            self._health.doubt()
        if not active.is_wanted:
            del self._live[active.key]
            self._leaving.add(active)

    def _emit_held_failures(self) -> None:
        """Emit the failures held back: the engine has made a token, so only these requests failed.

        After some errors of a GPU, the engine fails every request and reports nothing else. A client that was sent such
        a failure would not continue elsewhere.
        """
        for output in self._held_failures.values():
            self._steps.add(output)
        self._held_failures.clear()

    # Load

    def load(self) -> EngineLoad:
        """See Engine."""
        config = self._config
        ranks = rank_loads(
            self._live.values(),
            self._sample,
            ranks=config.rank_count,
            block_tokens=config.block_tokens,
            now=self._loop.time(),
        )
        return self._counts.load(ranks)

    def _record_stats(self, stats: Mapping[str, Any]) -> None:
        sample = sample_of(stats, self._loop.time())
        if sample is None:
            return
        if self._sample is None:
            _check_cache(sample.blocks_total * self._config.block_tokens, self._facts.context_length)
        self._sample = sample

    def _count_step(self) -> None:
        self._counts.steps += 1

    # Health

    async def _watch_health(self) -> None:
        try:
            await self._health.watch()
        except Exception as error:
            self._die(error)

    async def _watch_silent(self) -> None:
        """Fail requests that get no results: a response may be lost within the engine while other requests continue.

        Time in which this process itself stood still does not count, because no result could reach it.
        """
        checked_at = self._loop.time()
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            now = self._loop.time()
            late_s, checked_at = now - checked_at - SILENCE_CHECK_S, now
            for active in list(self._live.values()):
                active.last_result_at = min(now, active.last_result_at + late_s)
                limit_s = self._config.silence_s if active.has_begun else self._config.first_token_s
                if now - active.last_result_at > limit_s:
                    detail = f"TensorRT-LLM sent no result of this request for {limit_s:g} s"
                    active.fail(Failure(Reason.ENGINE_ERROR, detail))

    def _die(self, error: Exception) -> Failure:
        """Mark the engine as dead. Returns the failure that `run` raises; the first of several errors counts."""
        if self._death is None:
            self._death = Failure(Reason.ENGINE_DEAD, f"TensorRT-LLM has failed: {_why(error)}")
            self._has_died.set()
        return self._death.copy()


def _why(error: Exception) -> str:
    return error.detail if isinstance(error, Failure) else f"{type(error).__name__}: {error}"


def _check_cache(tokens: int, context_length: int) -> None:
    """Warn if the cache is smaller than one context: the engine would end or refuse longer requests."""
    if tokens < context_length:
        advice = "lower --max-seq-len, or raise --kv-cache-free-gpu-memory-fraction"
        log.warning(
            "the key-value cache holds less than one whole context",
            tokens=tokens,
            context_length=context_length,
            advice=advice,
        )
