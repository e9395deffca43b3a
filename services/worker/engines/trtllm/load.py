"""What the engine is doing: counted by us, request by request, and supplemented by what it says itself.

The engine says something only of iterations, so what it last said is stale as soon as it is idle; with several
data-parallel ranks it does not say which one it speaks of. Our own count is complete, but does not know that requests
share the blocks of a common beginning. So the lower of the two counts, as long as what the engine said is fresh.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from services.worker.engine import EngineLoad, RankLoad

SAMPLE_FRESH_S = 1.0
"""The engine's statistics are sampled each 0.2 s while it works."""


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
    """What the engine said of its key-value cache. at: when it came, in the loop's time."""

    at: float
    blocks_total: int
    blocks_used: int


@dataclass(slots=True)
class Counts:
    """Since the start: see EngineLoad."""

    steps: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    tokens_after_cancel: int = 0

    def load(self, ranks: Iterable[RankLoad]) -> EngineLoad:
        return EngineLoad(
            self.steps, tuple(ranks), self.prefill_tokens, self.generated_tokens, self.tokens_after_cancel
        )


def sample_of(stats: Mapping[str, Any], at: float) -> Sample | None:
    """Of one iteration's statistics; None: they say nothing of the cache."""
    cache = stats.get("kvCacheStats") or {}
    total = cache.get("maxNumBlocks")
    if not total:
        return None
    return Sample(at=at, blocks_total=int(total), blocks_used=int(cache.get("usedNumBlocks") or 0))


def rank_loads(
    residents: Iterable[Resident], sample: Sample | None, *, ranks: int, block_tokens: int, now: float
) -> list[RankLoad]:
    """Of each rank. All have caches of one size; without a sample nobody knows which, and no block counts as used."""
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
    """Where the fewest tokens are."""
    tokens = [0] * ranks
    for resident in residents:
        tokens[resident.rank] += resident.token_count
    return tokens.index(min(tokens))


def _blocks(resident: Resident, block_tokens: int) -> int:
    return -(-resident.token_count // block_tokens)


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
