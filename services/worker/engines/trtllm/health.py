"""Whether the engine lives. Its processes may be gone, and everything still look as ever: only a token proves anything.

| the engine has said nothing for `canary_after_s`, with requests for `probe_after_s`, or is in doubt | then |
| --- | --- |
| | it has to make a token: the canary |
| the canary's token comes, or any other meanwhile | it lives |
| the canary cannot be asked for | it is dead, with the error that it died of |
| the canary fails, time after time | it is dead |
| nothing comes, where no request runs, for `canary_s` | it is dead |
| nothing comes, where some run, for `stall_s` | it is dead |
"""

import asyncio
from collections.abc import Awaitable, Callable

from services.core.errors import Failure, Reason
from services.worker.engines.trtllm.options import TrtLlmConfig


class Health:
    """ask: makes the engine make a token, and returns when it has; raises what the engine died of.

    is_busy: whether requests run.
    """

    def __init__(self, config: TrtLlmConfig, ask: Callable[[], Awaitable[None]], is_busy: Callable[[], bool]) -> None:
        self._config = config
        self._ask = ask
        self._is_busy = is_busy
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._asked_at = self._loop.time()
        self._is_in_doubt = asyncio.Event()

    def asked(self) -> None:
        """It has something to do, after a time without."""
        self._asked_at = self._loop.time()

    def heard(self) -> None:
        """The engine has said something."""
        self._heard_at = self._loop.time()

    def doubt(self) -> None:
        """Something odd has happened: have it proven now."""
        self._is_in_doubt.set()

    async def watch(self) -> None:
        """Until the engine is dead: raises Failure(ENGINE_DEAD), or what the engine raises."""
        while True:
            await self._wait_silent()
            self._is_in_doubt.clear()
            await self._prove()

    async def _wait_silent(self) -> None:
        while not self._is_in_doubt.is_set():
            if self._is_busy():
                left = max(self._heard_at, self._asked_at) + self._config.probe_after_s - self._loop.time()
            else:
                left = self._heard_at + self._config.canary_after_s - self._loop.time()
            if left <= 0:
                return
            try:
                async with asyncio.timeout(min(left, self._config.probe_after_s)):
                    await self._is_in_doubt.wait()
            except TimeoutError:
                continue  # It may have been heard meanwhile, or have something to do.

    async def _prove(self) -> None:
        asked_at = self._loop.time()
        limit_s = self._config.stall_s if self._is_busy() else self._config.canary_s
        try:
            async with asyncio.timeout(limit_s):
                await self._ask()
        except TimeoutError:
            if self._heard_at <= asked_at:
                raise Failure(Reason.ENGINE_DEAD, f"it made no token for {limit_s:g} s") from None
