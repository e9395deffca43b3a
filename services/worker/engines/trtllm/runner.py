"""A loaded engine at work: requests in, results out, and a watch over whether it still lives.

| what goes wrong | what follows |
| --- | --- |
| RequestError | the engine has to prove itself: with its next token this request fails, without one all go elsewhere |
| the engine takes a request for wrong (TypeError, ValueError) | the request fails, and the engine has to prove itself |
| nothing is heard of one request while others go on | this request fails, and is aborted |
| any other exception, of whatever call | the engine is dead |
| no token of the whole engine: see health.py | the engine is dead |
| the event loop is held up: see ending.py | the process ends |

A dead engine is dead for good: `run` raises, every request fails with ENGINE_DEAD and goes on elsewhere, and the
process ends with exit status 1.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog

from services.core.errors import CAUSE, Failure, Reason, RefusedFor
from services.core.request import FinishReason, Request, Sampling, Stop
from services.runtime.tasks import root_cause
from services.worker.engine import Emit, EngineLoad, Output
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.engine_request import ERROR_CHARACTERS_MAX, EngineRequest
from services.worker.engines.trtllm.health import Health
from services.worker.engines.trtllm.load import Counts, Sample, emptiest_rank, rank_loads, read_stats, sample_of
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.engines.trtllm.sampling_params import ModelFacts, tokens_left
from services.worker.engines.trtllm.shutdown import LoopWatch, begin_shutdown, shut_down
from services.worker.engines.trtllm.step_buffer import StepBuffer

log = structlog.get_logger()

LEAVING_MAX = 4096
"""How many aborted requests may be waited for at a time; one more new request is refused then."""
LOOK_S = 1.0
"""How often it is looked for requests of which nothing is heard."""
CANARY_TRIES = 3
"""How often the canary may fail in a row: what is wrong with one request may fail all that are in its step."""
CANARY = Request(model="", token_ids=(0,), sampling=Sampling(temperature=0.0), stop=Stop(max_tokens=1, ignore_eos=True))
CANARY_KEY = -1


class Runner:
    """See the module. `run` once, on the loop that it is made on."""

    def __init__(self, client: Client, config: TrtLlmConfig, facts: ModelFacts, emit: Emit) -> None:
        self._client = client
        self._config = config
        self._facts = facts
        self._loop = asyncio.get_running_loop()
        self._group: asyncio.TaskGroup | None = None
        self._gathering = StepBuffer(emit, self._count_step)
        self._health = Health(config, self._ask_for_token, lambda: bool(self._live))
        self._death: Failure | None = None
        self._has_died = asyncio.Event()
        self._live: dict[int, EngineRequest] = {}  # What may be emitted, by key.
        self._leaving: set[EngineRequest] = set()
        self._failed: dict[int, Output] = {}  # Not told yet: it may be the engine that has failed.
        self._counts = Counts()
        self._sample: Sample | None = None

    async def run(self, ready: asyncio.Event) -> None:
        """Until cancelled. Raises ENGINE_DEAD."""
        with LoopWatch(self._config.loop_s):  # Around every call into the engine, the first and the last one too.
            await self._work(ready)

    async def _work(self, ready: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._warm_up()
                self._start_watching(self._group)
                ready.set()
                await self._has_died.wait()
                assert self._death is not None, "it comes before the event"
                raise self._death
        except BaseExceptionGroup as failures:
            raise root_cause(failures) from None
        finally:
            await self._end()

    def _start_watching(self, group: asyncio.TaskGroup) -> None:
        group.create_task(self._watch_health())
        group.create_task(self._watch_silent())
        if self._config.has_stats:
            group.create_task(read_stats(self._client.llm, self._take_stats, self._health.doubt))

    async def _end(self) -> None:
        """A dead engine must not hold up its requests, which go on elsewhere."""
        if self._death is None:
            await shut_down(self._client.llm, self._config.shutdown_s)
        else:
            begin_shutdown(self._client.llm)

    # Requests

    def submit(self, key: int, request: Request) -> None:
        """See Engine. Raises ENGINE_DEAD, too."""
        self._check_room()
        if tokens_left(request, self._facts.context_length) == 0:
            self._gathering.add(Output(key, finish=FinishReason.LENGTH))
            return
        if not self._live:
            self._health.asked()
        rank = emptiest_rank(self._live.values(), self._config.rank_count)
        result = self._start(request, rank)
        run = EngineRequest(
            ResultCursor(key, request, self._facts), request, result, self, rank=rank, abort_s=self._config.abort_s
        )
        self._live[key] = run
        assert self._group is not None, "the engine is not ready"
        self._group.create_task(self._follow(run))

    def cancel(self, key: int) -> None:
        """See Engine."""
        self._gathering.forget(key)
        self._failed.pop(key, None)
        run = self._live.pop(key, None)
        if run is not None:
            self._leaving.add(run)
            run.cancel()

    def _check_room(self) -> None:
        if self._death is not None:
            raise self._death.copy()
        if len(self._live) >= self._config.max_batch_size or len(self._leaving) >= LEAVING_MAX:
            detail = "Server overloaded: worker at capacity"
            raise Failure(Reason.WORKER_AT_CAPACITY, detail, metadata={CAUSE: RefusedFor.CAPACITY})

    def _start(self, request: Request, rank: int) -> Any:
        """A result to iterate over. Raises ENGINE_ERROR where it may be the request's fault, ENGINE_DEAD otherwise."""
        try:
            return self._client.start(request, rank)
        except Failure:
            raise
        except (self._client.request_error, TypeError, ValueError) as error:
            self._health.doubt()  # What an engine died of may be of any class.
            detail = f"TensorRT-LLM refused this request: {str(error)[:ERROR_CHARACTERS_MAX]}"
            raise Failure(Reason.ENGINE_ERROR, detail) from error
        except Exception as error:
            raise self._die(error) from error

    async def _follow(self, run: EngineRequest) -> None:
        try:
            await run.follow(self._client.request_error)
        except asyncio.CancelledError:
            if self._death is None:  # A call into a dead engine may not return.
                run.abort()
            raise
        except Exception as error:
            self._die(error)
        finally:
            self._live.pop(run.key, None)
            self._leaving.discard(run)

    def on_result(self, run: EngineRequest, *, prefilled: int, drawn: int) -> None:
        """See run.Listener."""
        self._gathering.step_soon()
        self._health.heard()
        if drawn:
            self._tell_failed()
        if run.key == CANARY_KEY:
            return
        self._counts.prefill_tokens += prefilled
        self._counts.generated_tokens += drawn
        if run.is_cancelled:
            self._counts.tokens_after_cancel += prefilled + drawn

    def on_output(self, run: EngineRequest, output: Output) -> None:
        """See run.Listener."""
        if run.key == CANARY_KEY:
            if output.failure is not None:
                log.warning("the engine failed a request of our own", why=output.failure.detail)
            return
        if output.failure is None:
            self._gathering.add(output)
        else:
            self._failed[run.key] = output
            self._health.doubt()
        if not run.is_wanted:
            del self._live[run.key]
            self._leaving.add(run)

    def _tell_failed(self) -> None:
        """The engine lives, so it was these requests that failed.

        After some errors of a GPU each request fails, and nothing else is said. Who was told so would not go elsewhere.
        """
        for output in self._failed.values():
            self._gathering.add(output)
        self._failed.clear()

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

    def _take_stats(self, stats: Mapping[str, Any]) -> None:
        sample = sample_of(stats, self._loop.time())
        if sample is None:
            return
        if self._sample is None:
            self._check_cache(sample.blocks_total * self._config.block_tokens)
        self._sample = sample

    def _check_cache(self, tokens: int) -> None:
        """A longer request than it holds would end early, or be refused by the engine."""
        if tokens < self._facts.context_length:
            advice = "lower --max-seq-len, or raise --kv-cache-free-gpu-memory-fraction"
            log.warning(
                "the key-value cache holds less than one whole context",
                tokens=tokens,
                context_length=self._facts.context_length,
                advice=advice,
            )

    def _count_step(self) -> None:
        self._counts.steps += 1

    # Life

    async def _warm_up(self) -> None:
        """The engine says nothing of its cache before the first token. Raises ENGINE_DEAD."""
        try:
            async with asyncio.timeout(self._config.warm_up_s):
                await self._ask_for_token()
        except Exception as error:
            why = "there was none in time" if isinstance(error, TimeoutError) else _why(error)
            raise Failure(Reason.ENGINE_DEAD, f"TensorRT-LLM cannot make a token: {why}") from error

    async def _ask_for_token(self) -> None:
        """Raises what the engine died of, or ENGINE_DEAD when it fails the simplest request each time it is asked."""
        for _ in range(CANARY_TRIES):
            if await self._has_made_token():
                self._health.heard()
                return
        raise Failure(Reason.ENGINE_DEAD, f"it failed {CANARY_TRIES} times on a request for one token")

    async def _has_made_token(self) -> bool:
        result = self._client.start(CANARY)
        run = EngineRequest(
            ResultCursor(CANARY_KEY, CANARY, self._facts), CANARY, result, self, rank=0, abort_s=self._config.abort_s
        )
        try:
            await run.follow(self._client.request_error)
        finally:
            if self._death is None:  # A call into a dead engine may not return.
                run.abort()
        return run.drawn > 0

    async def _watch_health(self) -> None:
        try:
            await self._health.watch()
        except Exception as error:
            self._die(error)

    async def _watch_silent(self) -> None:
        """A response may get lost within the engine: its request must not wait for ever while others go on."""
        while True:
            await asyncio.sleep(LOOK_S)
            for run in list(self._live.values()):
                limit_s = self._config.silence_s if run.has_begun else self._config.first_token_s
                if self._loop.time() - run.heard_at > limit_s:
                    run.fail(Failure(Reason.ENGINE_ERROR, f"TensorRT-LLM said nothing of it for {limit_s:g} s"))

    def _die(self, error: Exception) -> Failure:
        """The engine is dead: `run` raises the failure that this returns. Of several errors the first counts."""
        if self._death is None:
            self._death = Failure(Reason.ENGINE_DEAD, f"TensorRT-LLM has failed: {_why(error)}")
            self._has_died.set()
        return self._death.copy()


def _why(error: Exception) -> str:
    return error.detail if isinstance(error, Failure) else f"{type(error).__name__}: {error}"
