"""Guides answers on the event loop: one helper process for each compiles its grammar and computes its masks.

| what happens to the helper | what the request gets |
| --- | --- |
| it refuses the text | that failure: INVALID_ARGUMENT, or GRAMMAR_REPLAY_MISMATCH |
| it crashes, or exceeds its processor time or memory | INVALID_ARGUMENT |
| it is killed from outside | another one, which continues after the tokens so far; the second time ENGINE_ERROR |
| it is frozen, or cannot be started | WORKER_AT_CAPACITY |

For a vocabulary of 49,152 tokens, the process that forks the helpers takes about 0.3 s to start, while the worker is
ready already, and 70 MB. A helper takes some 3 ms to start and, by estimate, 5 MB.
"""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from services.core.errors import Failure, Reason
from services.core.request import GuidedKind, Request
from services.isolation.bounds import Bounds
from services.isolation.helper_process import HelperProcess
from services.isolation.losses import BLAMED, HelperLost, Loss
from services.isolation.pool import HelperPool
from services.runtime.process import StartupError
from services.worker.guided.guide import Guide, Post
from services.worker.guided.guide_jobs import decode_step, encode_compilation, encode_token
from services.worker.guided.refusals import at_capacity, of_pool, unusable

log = structlog.get_logger()

KINDS: tuple[GuidedKind, ...] = tuple(GuidedKind)
LOADER = "services.worker.guided.guide_work:load"
COMPILE_CPU_S_MAX = 3.0
"""Processor time to compile a grammar, so that a busy machine is not mistaken for a hostile text."""
ANSWER_S_MAX = 60.0
"""How long a helper may take for a grammar or a token on the clock."""
MEMORY_BYTES_MAX = 512 << 20
"""Memory that a helper may take. A usual schema takes less than 10 MB."""
COMPILING_MAX = 4
"""Grammars that are compiled at a time, so that the engine keeps a share of the processor."""
COMPILING_WAIT_S_MAX = 5.0
TRIES_MAX = 2
"""Helpers in a row that may be killed from outside, without a result between them, before the request fails."""


def check_installed() -> None:
    """Raise StartupError unless the library is installed that helpers use. Imports nothing."""
    if importlib.util.find_spec("llguidance") is None:
        raise StartupError("guided answers need llguidance: pip install 'unbroken[llamacpp]'")


def guide_pool(vocabulary: bytes, answers_max: int, on_lost: Callable[[Loss], object] = lambda _: None) -> HelperPool:
    """The helpers of a vocabulary: see `guide_jobs.encode_vocabulary`. `answers_max`: guided answers at a time.

    on_lost: called with each helper that is lost.
    """
    bounds = Bounds(
        helpers_max=answers_max,
        jobs_max=2 * answers_max,  # A new request may wait for the helper of a cancelled one to end.
        job_cpu_s_max=COMPILE_CPU_S_MAX,
        job_s_max=ANSWER_S_MAX,
        job_bytes_max=MEMORY_BYTES_MAX,
    )
    return HelperPool("guided answers", LOADER, vocabulary, bounds=bounds, on_lost=on_lost)


class _Answer:
    """An answer, and what its next helper needs to know."""

    def __init__(self, request: Request, guide: Guide) -> None:
        assert request.guided is not None
        self.guided = request.guided
        self.generated = list(request.generated_token_ids)
        self.guide = guide
        self.has_begun = False
        self.tries_left = TRIES_MAX

    def failure_of(self, lost: HelperLost) -> Failure | None:
        """The end of the answer; None: another helper may continue it."""
        self.tries_left -= 1
        if lost.loss in BLAMED:
            return unusable(self.guided.kind, f"{_blame(lost)}; simplify it")
        if lost.loss is Loss.FROZEN:
            return at_capacity(f"the process that guides the answer {lost.how}")
        if self.tries_left == 0:
            return Failure(Reason.ENGINE_ERROR, f"the process that guides the answer {lost.how}, twice")
        return None


class Guides:
    """Guides answers with the helpers of a pool. Use it on the pool's event loop. `post`: see `Guide`."""

    def __init__(self, pool: HelperPool, post: Post) -> None:
        self._pool = pool
        self._post = post
        self._compiling = asyncio.Semaphore(COMPILING_MAX)

    async def load(self) -> None:
        """Start the process that forks the helpers, before the first of them is needed."""
        try:
            await self._pool.load()
        except Failure as failure:
            log.error("guided answers are not possible: their helper process cannot start", why=failure.detail)

    async def close(self) -> None:
        await self._pool.close()

    async def serve(self, request: Request, begin: Callable[[Guide], object]) -> None:
        """Guide an answer until the caller is cancelled. `begin` is called once the grammar is compiled.

        Raises Failure if it cannot be compiled. Once the answer has begun, its guide raises the failure.
        """
        answer = _Answer(request, Guide(self._post))
        try:
            while True:
                await self._serve_once(answer, begin)
        except Exception as error:
            failure = _failure_for(error)
        if not answer.has_begun:
            raise failure
        answer.guide.fail(failure)

    async def _serve_once(self, answer: _Answer, begin: Callable[[Guide], object]) -> None:
        """Guide an answer with one helper. Returns if another one may continue. Raises Failure."""
        try:
            async with self._pool.conversation() as helper:
                await self._converse(helper, answer, begin)
        except HelperLost as lost:
            if (failure := answer.failure_of(lost)) is not None:
                raise failure from None

    async def _converse(self, helper: HelperProcess, answer: _Answer, begin: Callable[[Guide], object]) -> None:
        """Compile the grammar, and answer the engine's thread from then on. Raises what the helper does."""
        async with self._place():
            step = await helper.do(encode_compilation(answer.guided, answer.generated))
        while True:
            answer.tries_left = TRIES_MAX
            answer.guide.put(decode_step(step))
            if not answer.has_begun:
                answer.has_begun = True
                begin(answer.guide)
            token = await answer.guide.accepted_token()
            answer.generated.append(token)
            step = await helper.do(encode_token(token))

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among those that are compiled. Raises WORKER_AT_CAPACITY."""
        try:
            async with asyncio.timeout(COMPILING_WAIT_S_MAX):
                await self._compiling.acquire()
        except TimeoutError:
            raise at_capacity("too many grammars are being compiled") from None
        try:
            yield
        finally:
            self._compiling.release()


def _failure_for(error: Exception) -> Failure:
    """What a request gets for what the pool or a helper raises."""
    if isinstance(error, Failure):
        return of_pool(error)
    log.error("guiding an answer failed", exc_info=error)
    return Failure(Reason.ENGINE_ERROR, "the worker could not compile or apply the grammar")


def _blame(lost: HelperLost) -> str:
    """What a text did to its helper."""
    match lost.loss:
        case Loss.CPU:
            return f"it takes too much processor time (of at most {COMPILE_CPU_S_MAX:g} s)"
        case Loss.MEMORY:
            return f"it {lost.how}"
    return f"it crashes the process that applies it, which {lost.how}"
