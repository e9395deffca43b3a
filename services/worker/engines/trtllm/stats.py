"""Reads the engine's statistics: the one reader that there may be, for reading takes them out.

What iterates over them is one object for all calls. It is over after a while without news and stays so until the next
request, so it is asked again and again; and it has many ways to say that there is nothing.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import structlog

log = structlog.get_logger()

PAUSE_S = 0.2
"""Between two looks: the engine takes a sample as often."""
WAIT_S = 0.5
"""How long one look waits for news."""
_NO_NEWS = (IndexError, asyncio.QueueEmpty, TimeoutError)


async def read_stats(llm: Any, take: Callable[[Mapping[str, Any]], None], doubt: Callable[[], None]) -> None:
    """Until cancelled, or until the engine raises, which may be the error that it died of: then `doubt` is called.

    take: gets each. Without statistics what we count ourselves has to do.
    """
    while True:
        try:
            async for stats in llm.get_stats_async(timeout=WAIT_S):
                take(stats)
        except _NO_NEWS:
            pass
        except Exception as error:
            log.warning("the engine's statistics cannot be read, and are not asked for any more", why=str(error))
            doubt()
            return
        await asyncio.sleep(PAUSE_S)
