"""The load of the engine: our own count of its requests, corrected by the engine's statistics.

The engine reports statistics of iterations only, so they are stale as soon as it is idle; with several data-parallel
ranks it does not say which rank they belong to. Our own count is complete, but does not know that requests with a
common prefix share blocks. The load is therefore the lower of the two, as long as the statistics are fresh.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from services.worker.engine import EngineLoad, RankLoad

SAMPLE_FRESH_S = 1.0
"""How long a sample counts as fresh. The engine samples its statistics every 0.2 s while it works."""
PAUSE_S = 0.2
"""Pause between two reads of the statistics."""
WAIT_S = 0.5
"""How long one read waits for statistics."""
_NO_STATS = (IndexError, asyncio.QueueEmpty, TimeoutError)

log = structlog.get_logger()


class Resident(Protocol):
    """A request on the engine."""

    @property
    def rank(self) -> int: ...

    @property
    def begun_at(self) -> float: ...

    @property
    def token_count(self) -> int: ...

    @property
    def prefill_left(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The engine's statistics of its key-value cache. `at`: when they arrived, in event-loop time."""

    at: float
    blocks_total: int
    blocks_used: int


@dataclass(slots=True)
class Counts:
    """Totals since the start: see EngineLoad."""

    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_after_cancel: int = 0

    def load(self, ranks: Iterable[RankLoad]) -> EngineLoad:
        return EngineLoad(
            self.steps, tuple(ranks), self.prefill_tokens, self.generated_tokens, self.tokens_after_cancel
        )


def sample_of(stats: Mapping[str, Any], at: float) -> Sample | None:
    """The sample in one iteration's statistics; None if they do not mention the cache."""
    cache = stats.get("kvCacheStats") or {}
    total = cache.get("maxNumBlocks")
    if not total:
        return None
    return Sample(at=at, blocks_total=int(total), blocks_used=int(cache.get("usedNumBlocks") or 0))


def rank_loads(
    residents: Iterable[Resident], sample: Sample | None, *, ranks: int, block_tokens: int, now: float
) -> list[RankLoad]:
    """The load of each rank.

    All ranks have caches of the same size. Without a sample the size is unknown, and no block counts as used.
    """
    here: list[list[Resident]] = [[] for _ in range(ranks)]
    for resident in residents:
        here[resident.rank].append(resident)
    total = 0 if sample is None else sample.blocks_total
    loads = []
    for number, some in enumerate(here):
        used = min(total, sum(_blocks(one, block_tokens) for one in some))
        if sample is not None and ranks == 1 and now - sample.at <= SAMPLE_FRESH_S:
            later = sum(_blocks(one, block_tokens) for one in some if one.begun_at > sample.at)
            used = min(used, sample.blocks_used + later)
        loads.append(RankLoad(used, total, sum(one.prefill_left for one in some), number))
    return loads


def emptiest_rank(residents: Iterable[Resident], ranks: int) -> int:
    """The rank with the fewest tokens."""
    tokens = [0] * ranks
    for resident in residents:
        tokens[resident.rank] += resident.token_count
    return tokens.index(min(tokens))


def _blocks(resident: Resident, block_tokens: int) -> int:
    return -(-resident.token_count // block_tokens)


async def read_stats(llm: Any, on_stats: Callable[[Mapping[str, Any]], None], on_error: Callable[[], None]) -> None:
    """Read the engine's statistics until cancelled, calling `on_stats` with each.

    If the engine raises, possibly because it has died, calls `on_error` and returns; the load is then our own count.
    """
    while True:
        try:
            async for stats in llm.get_stats_async(timeout=WAIT_S):
                on_stats(stats)
        except _NO_STATS:
            pass
        except Exception as error:
            log.warning("reading the engine's statistics failed, reading stops", why=str(error))
            on_error()
            return
        await asyncio.sleep(PAUSE_S)
