"""Gives jobs to helper processes, and replaces the helpers that jobs cost."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import structlog

from services.core.bounded_executor import TOO_MANY, not_prepared
from services.core.errors import Failure
from services.isolation.bounds import Bounds
from services.isolation.helper_process import HelperBug, HelperProcess
from services.isolation.losses import BLAMED, HelperLost, Loss
from services.isolation.server_process import ServerLost, ServerProcess

log = structlog.get_logger()

TRIES_MAX = 2
"""Helpers that one job gets. It gets a second one if the first was killed from outside, which may not be its fault."""
DEFAULTS = Bounds()


class HelperPool:
    """The helpers that work with one loaded thing, and their fork server. Each method is called on one event loop.

    Its only task starts the fork server, once for all jobs that need it. If a caller is cancelled, its helper ends.

    | what happens | what the job gets |
    | --- | --- |
    | `jobs_max` jobs run or wait | OVERLOADED, at once |
    | no helper is free within `wait_s_max` | OVERLOADED |
    | the work refuses it | that Failure |
    | its helper crashes, or exceeds its processor time or memory | HelperLost |
    | its helper is killed, or its fork server is lost | another helper; the second time OVERLOADED |
    | its helper is frozen | OVERLOADED |
    | the fork server cannot be started again within `start_wait_s_max` | OVERLOADED |
    """

    def __init__(
        self,
        name: str,
        loader: str,
        content: bytes,
        *,
        bounds: Bounds | None = None,
        on_lost: Callable[[Loss], object] = lambda _: None,
        rng: random.Random | None = None,
    ) -> None:
        """Start nothing yet.

        name: of what is loaded, for logs and failures. loader: "module:function", which turns `content` into the work.
        on_lost: called with each helper that is lost.
        """
        self._name = name
        self._loader = loader
        self._content = content
        self._bounds = bounds = bounds or DEFAULTS
        self._on_lost = on_lost
        self._rng = rng or random.Random()
        self._server: ServerProcess | None = None
        self._start: asyncio.Task[None] | None = None
        self._load_failure: Failure | None = None
        self._failures = 0  # The fork server failed this often since the last answer.
        self._not_before = 0.0  # On the loop's clock: when the fork server may be started again.
        self._free_helpers = asyncio.Semaphore(bounds.helpers_max)
        self._helpers: set[HelperProcess] = set()
        self._idle: dict[HelperProcess, asyncio.TimerHandle] = {}  # The one that was used last comes last.
        self._job_count = 0
        self._is_closed = False

    async def load(self) -> None:
        """Start the fork server now. Raises Failure if it cannot load the content, or crashes while it does."""
        if await self._running_server() is None:
            assert self._load_failure is not None
            raise self._load_failure

    async def run(self, job: bytes) -> bytes:
        """Do a job. See the table above. Raises HelperBug for a bug in the work."""
        async with self._place():
            return await self._try(job)

    @asynccontextmanager
    async def conversation(self) -> AsyncIterator[HelperProcess]:
        """A new helper for jobs that build on each other, with `HelperProcess.do`. It counts as one job.

        It ends with the block. Raises OVERLOADED. If it is lost, the block gets HelperLost, and no other helper.
        """
        async with self._place():
            helper = await self._forked_helper()
            self._failures = 0
            try:
                yield helper
            except HelperLost as lost:
                self._note(lost)
                raise
            finally:
                self._end(helper)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among the jobs, and then one among the helpers. Raises OVERLOADED."""
        if self._job_count >= self._bounds.jobs_max:
            raise not_prepared(TOO_MANY)
        self._job_count += 1
        try:
            await self._wait_free_helper()
            try:
                yield
            finally:
                self._free_helpers.release()
        finally:
            self._job_count -= 1

    async def _wait_free_helper(self) -> None:
        try:
            async with asyncio.timeout(self._bounds.wait_s_max):
                await self._free_helpers.acquire()
        except TimeoutError:
            detail = f"no process was free within {self._bounds.wait_s_max:g} s to prepare the request"
            raise not_prepared(detail) from None

    async def _try(self, job: bytes) -> bytes:
        for tries_left in reversed(range(TRIES_MAX)):
            helper = await self._helper()
            try:
                return await self._do(helper, job)
            except HelperLost as lost:
                self._note(lost)
                if lost.loss in BLAMED:
                    raise
                if lost.loss is Loss.FROZEN or not tries_left:
                    raise not_prepared(f"the process that prepared the request {lost.how}") from None
        raise AssertionError("the last try raises or returns")

    async def _do(self, helper: HelperProcess, job: bytes) -> bytes:
        """Do a job, and keep the helper unless it is lost or the caller is cancelled."""
        is_intact = False
        try:
            answer = await helper.do(job)
            is_intact = True
            self._failures = 0
            return answer
        except (Failure, HelperBug):
            is_intact = True
            raise
        finally:
            if is_intact and helper.is_usable:
                loop = asyncio.get_running_loop()
                self._idle[helper] = loop.call_later(self._bounds.idle_s_max, self._end, helper)
            else:
                self._end(helper)

    def _note(self, lost: HelperLost) -> None:
        log.warning("helper process lost", work=self._name, cause=lost.loss, how=lost.how, report=lost.report)
        self._on_lost(lost.loss)

    async def _helper(self) -> HelperProcess:
        """An idle helper, or a new one. Raises OVERLOADED."""
        while self._idle:
            helper, timer = self._idle.popitem()
            timer.cancel()
            if helper.is_usable:
                return helper
            self._end(helper)
        return await self._forked_helper()

    async def _forked_helper(self) -> HelperProcess:
        """A new helper. Raises OVERLOADED."""
        try:
            async with asyncio.timeout(self._bounds.start_wait_s_max):
                return await self._new_helper()
        except TimeoutError:
            detail = f"no process could be started within {self._bounds.start_wait_s_max:g} s to prepare the request"
            raise not_prepared(detail) from None

    async def _new_helper(self) -> HelperProcess:
        """Fork a helper; start the fork server again, as often as it takes."""
        while True:
            if (server := await self._running_server()) is not None:
                try:
                    helper = await HelperProcess.fork(server, self._bounds)
                except ServerLost as error:
                    self._count_failure(error)
                    await asyncio.sleep(self._wait_s())
                else:
                    self._helpers.add(helper)
                    return helper

    async def _running_server(self) -> ServerProcess | None:
        """The fork server, started if there is none. Returns None if that failed. Raises OVERLOADED after `close`."""
        if not self._is_closed and (self._server is None or self._server.is_lost):
            if self._start is None:
                self._start = asyncio.get_running_loop().create_task(self._start_server())
            start = self._start
            await asyncio.wait([start])  # Unlike `await start`, does not cancel it with the caller.
            if not start.cancelled():
                start.result()  # Raises nothing but bugs.
        if self._is_closed:
            raise not_prepared("the processes that prepare requests are ending")
        return self._server

    async def _start_server(self) -> None:
        """Start a fork server, after the back-off, in a task of its own: it may take longer than a caller waits."""
        try:
            if self._server is not None:
                lost, self._server = self._server, None
                await lost.close()
            await asyncio.sleep(self._wait_s())
            self._server = await ServerProcess.start(self._name, self._loader, self._content, self._bounds)
            self._load_failure = None
        except ServerLost as error:
            self._load_failure = not_prepared(f"the process that prepares requests cannot be started: {error}")
            self._count_failure(error)
        except Failure as failure:
            self._load_failure = failure
            self._count_failure(failure)
        finally:
            self._start = None

    def _count_failure(self, error: Exception) -> None:
        log.warning("fork server does not work", work=self._name, why=str(error))
        delay_s = self._bounds.backoff.delay_s(self._failures, self._rng)
        self._failures += 1
        self._not_before = asyncio.get_running_loop().time() + delay_s

    def _wait_s(self) -> float:
        return max(0.0, self._not_before - asyncio.get_running_loop().time())

    def _end(self, helper: HelperProcess) -> None:
        self._idle.pop(helper, None)
        self._helpers.discard(helper)
        helper.end()

    async def close(self) -> None:
        """End all processes, and wait until they have ended. Jobs that run are refused."""
        self._is_closed = True
        for timer in self._idle.values():
            timer.cancel()
        for helper in tuple(self._helpers):
            self._end(helper)
        if self._start is not None:
            self._start.cancel()
            await asyncio.wait([self._start])
        if self._server is not None:
            await self._server.close()
