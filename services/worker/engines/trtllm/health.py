"""Health checks of the engine. Its processes may be gone without any visible sign: only a token proves that it lives.

| event | consequence |
| --- | --- |
| no result for `canary_after_s` while idle, or for `probe_after_s` with requests, or a doubt | the canary is asked |
| the canary gets its token, or any request a result meanwhile | the engine lives |
| asking the canary raises | the engine is dead, with this error |
| the canary fails CANARY_TRIES times in a row | the engine is dead |
| no result for `canary_s` while no request runs | the engine is dead |
| no result for `stall_s` while requests run | the engine is dead |

Looks are counted rather than time: while this process itself stands still, no result can reach it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import structlog

from services.core.errors import Failure, Reason
from services.core.request import Request, Sampling, Stop
from services.runtime.tasks import wait_event
from services.worker.engine import Output
from services.worker.engines.trtllm.client import Client
from services.worker.engines.trtllm.engine_request import EngineRequest
from services.worker.engines.trtllm.options import TrtLlmConfig
from services.worker.engines.trtllm.result_cursor import ResultCursor
from services.worker.engines.trtllm.sampling_params import ModelFacts

log = structlog.get_logger()

CANARY_TRIES = 3
"""How often in a row the canary may fail: an error of one request may fail all requests of its step."""
LOOKS = 4
"""How often the worker looks for a token in `stall_s` or `canary_s`. A process that stands still misses one of them."""
CANARY = Request(model="", token_ids=(0,), sampling=Sampling(temperature=0.0), stop=Stop(max_tokens=1, ignore_eos=True))
_CANARY_KEY = -1


class Canary:
    """Our own request for one token. Nothing of it is emitted or counted.

    `on_result`: called with the number of new tokens in each result. `is_dead`: whether the engine is known to be dead.
    """

    def __init__(
        self,
        client: Client,
        facts: ModelFacts,
        abort_s: float,
        on_result: Callable[[int], None],
        is_dead: Callable[[], bool],
    ) -> None:
        self._client = client
        self._facts = facts
        self._abort_s = abort_s
        self._on_result = on_result
        self._is_dead = is_dead

    async def ask(self) -> None:
        """Return once the engine has made a token.

        Raises the error that the engine died of, or ENGINE_DEAD if the request fails CANARY_TRIES times.
        """
        for _ in range(CANARY_TRIES):
            if await self._has_made_token():
                return
        raise Failure(Reason.ENGINE_DEAD, f"it failed {CANARY_TRIES} times on a request for one token")

    async def _has_made_token(self) -> bool:
        result = self._client.start(CANARY)
        cursor = ResultCursor(_CANARY_KEY, CANARY, self._facts)
        active = EngineRequest(cursor, CANARY, result, self, rank=0, abort_s=self._abort_s)
        try:
            await active.follow(self._client.request_error)
        finally:
            if not self._is_dead():  # A call into a dead engine may not return.
                active.abort()
        return active.drawn > 0

    def on_result(self, active: EngineRequest, *, prefilled: int, drawn: int) -> None:
        """See engine_request.Listener."""
        del active, prefilled
        self._on_result(drawn)

    def on_output(self, active: EngineRequest, output: Output) -> None:
        """See engine_request.Listener."""
        del active
        if output.failure is not None:
            log.warning("the engine failed its health check", why=output.failure.detail)


class Health:
    """Watches the engine, and asks for a token when it is silent or in doubt.

    `ask`: returns once the engine has made a token; raises the error that the engine died of. `is_busy`: whether
    requests run.
    """

    def __init__(self, config: TrtLlmConfig, ask: Callable[[], Awaitable[None]], is_busy: Callable[[], bool]) -> None:
        self._config = config
        self._ask = ask
        self._is_busy = is_busy
        self._loop = asyncio.get_running_loop()
        self._last_result_at = self._request_at = self._loop.time()
        self._is_in_doubt = asyncio.Event()

    def note_request(self) -> None:
        """A request was submitted to an idle engine."""
        self._request_at = self._loop.time()

    def note_result(self) -> None:
        """The engine sent a result."""
        self._last_result_at = self._loop.time()

    def doubt(self) -> None:
        """An error makes it doubtful that the engine lives: ask for a token now."""
        self._is_in_doubt.set()

    async def watch(self) -> None:
        """Watch until the engine is dead. Raises Failure(ENGINE_DEAD) or the error of the engine."""
        while True:
            await self._wait_silent()
            self._is_in_doubt.clear()
            await self._prove()

    async def _wait_silent(self) -> None:
        while not self._is_in_doubt.is_set():
            if self._is_busy():
                left = max(self._last_result_at, self._request_at) + self._config.probe_after_s - self._loop.time()
            else:
                left = self._last_result_at + self._config.canary_after_s - self._loop.time()
            if left <= 0:
                return
            # A result or a request may arrive meanwhile.
            await wait_event(self._is_in_doubt, min(left, self._config.probe_after_s))

    async def _prove(self) -> None:
        asked_at = self._loop.time()
        limit_s = self._config.stall_s if self._is_busy() else self._config.canary_s
        try:
            async with _timeout_by_looks(limit_s):
                await self._ask()
            self.note_result()
        except TimeoutError:
            if self._last_result_at <= asked_at:
                raise Failure(Reason.ENGINE_DEAD, f"it made no token for {limit_s:g} s") from None


@asynccontextmanager
async def _timeout_by_looks(limit_s: float) -> AsyncIterator[None]:
    """As `asyncio.timeout`, but times out at the last of LOOKS looks, each a part of `limit_s` after the one before."""
    loop, left = asyncio.get_running_loop(), LOOKS
    timer = loop.call_later(limit_s / LOOKS, lambda: look())

    def look() -> None:
        nonlocal left, timer
        left -= 1
        if left:
            timer = loop.call_later(limit_s / LOOKS, look)
        else:
            scope.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as scope:
            yield
    finally:
        timer.cancel()
