"""The statistics of an iteration, under the names of the real package. Only rank 0 reports them."""

from typing import Any

from .rank import Rank


def iteration_stats(step: int, rank: Rank, queued_count: int, latency_ms: float, read_count: int) -> dict[str, Any]:
    """The statistics of one step. `read_count`: prompt tokens that it computed."""
    cache, used = rank.cache, rank.used_count()
    context_count = sum(choice.prefill_left > 0 for choice in rank.active)
    found = cache.reused_count + cache.missed_count
    return {
        "iter": step,
        "iterLatencyMS": latency_ms,
        "numActiveRequests": len(rank.active),
        "maxNumActiveRequests": rank.batch_size,
        "numQueuedRequests": queued_count,
        "kvCacheStats": {
            "maxNumBlocks": cache.block_count,
            "usedNumBlocks": used,
            "freeNumBlocks": cache.block_count - used,
            "tokensPerBlock": cache.block_size,
            "reusedBlocks": cache.reused_count,
            "missedBlocks": cache.missed_count,
            "cacheHitRate": cache.reused_count / found if found else 0.0,
        },
        "inflightBatchingStats": {
            "numScheduledRequests": len(rank.active),
            "numContextRequests": context_count,
            "numGenRequests": len(rank.active) - context_count,
            "numPausedRequests": 0,
            "numCtxTokens": read_count,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 1.0,
        },
    }
