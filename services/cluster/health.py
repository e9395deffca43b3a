"""Waits until a frontend can serve a model."""

import asyncio
from collections.abc import Sequence

import aiohttp

from services.runtime.process import StartupError

UNAUTHORIZED = 401
HEALTH_POLL_S = 0.05
HEALTH_TIMEOUT_S = 5.0
"""For one HTTP request. `wait_served` has a timeout of its own for the whole wait."""


async def wait_served(url: str, *, timeout_s: float) -> Sequence[str]:
    """Wait until the frontend at `url` serves a model. Returns the names of its models, or none if it asks for a key.

    Raises StartupError after `timeout_s`.
    """
    answer = "no answer"
    timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
    try:
        # A certificate proves nothing here: the frontend is a child of this process, and is sent no secret.
        connector = aiohttp.TCPConnector(ssl=False)
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session,
        ):
            while True:
                try:
                    async with session.get("/health") as response:
                        if response.status == 200:
                            return await _models(session)
                        answer = f"status {response.status}: {await response.text()}"
                except (aiohttp.ClientError, TimeoutError) as error:  # It does not listen at the moment.
                    answer = f"{type(error).__name__}: {error}"
                await asyncio.sleep(HEALTH_POLL_S)
    except TimeoutError:
        raise StartupError(f"{url}/health is not 200 after {timeout_s:g} s: {answer}") from None


async def _models(session: aiohttp.ClientSession) -> Sequence[str]:
    async with session.get("/v1/models") as response:
        if response.status == UNAUTHORIZED:
            return ()  # Clients need keys, and this process has none.
        response.raise_for_status()
        return [model["id"] for model in (await response.json())["data"]]
