"""One data-parallel rank: the slots of its batch, and its cache. Without attention data parallelism there is one."""

from dataclasses import dataclass, field

from .choice import Choice
from .kv_cache import KvCache


@dataclass(slots=True)
class Rank:
    """One rank. `index`: from 0. `batch_size`: the number of slots. `active`: running choices, oldest first."""

    index: int
    batch_size: int
    cache: KvCache
    active: list[Choice] = field(default_factory=list)

    def admit(self, choice: Choice) -> bool:
        """Start the choice if there is a slot and room in the cache. Returns whether it was started."""
        answer = choice.answer
        prompt = answer.request.prompt_token_ids
        if len(self.active) >= self.batch_size:
            return False
        allocation = self.cache.allocate(len(prompt) + answer.max_tokens, answer.request.cache_salt)
        if allocation is None:
            return False
        choice.allocation = allocation
        answer.cached_tokens = self.cache.match(allocation, prompt)
        choice.prefill_left = len(prompt) - answer.cached_tokens
        self.active.append(choice)
        return True

    def keep(self, choices: list[Choice]) -> None:
        """Keep these choices; all others have ended."""
        kept = set(choices)
        for choice in self.active:
            assert choice.allocation is not None, "an active choice has an allocation"
            full_count = choice.token_count // self.cache.block_size
            if not choice.prefill_left and full_count > len(choice.allocation.hashes):
                self.cache.extend(choice.allocation, [*choice.answer.request.prompt_token_ids, *choice.generated])
            if choice not in kept:
                self.cache.release(choice.allocation)
        self.active = choices

    def used_count(self) -> int:
        """The number of blocks in use."""
        return self.cache.used_count([choice.token_count - choice.prefill_left for choice in self.active])


def candidate_ranks(choice: Choice, ranks: list[Rank]) -> list[Rank]:
    """The ranks that may run the choice, best first. A strict request waits for the requested rank."""
    scheduling = choice.answer.request.scheduling_params
    by_load = sorted(ranks, key=lambda rank: len(rank.active))
    if len(ranks) == 1 or scheduling is None or scheduling.attention_dp_rank is None:
        return by_load
    requested = [rank for rank in ranks if rank.index == scheduling.attention_dp_rank]
    others = [rank for rank in by_load if rank not in requested]
    return requested if scheduling.attention_dp_relax is False else requested + others
