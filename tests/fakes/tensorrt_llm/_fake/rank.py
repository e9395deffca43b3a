"""One data-parallel rank: the slots of its batch and its cache. There is one, unless attention is data-parallel."""

from dataclasses import dataclass, field

from .choice import Choice
from .kv_cache import KvCache


@dataclass(slots=True)
class Rank:
    """index: from 0. batch_size: how many slots. active: the choices that run, oldest first."""

    index: int
    batch_size: int
    cache: KvCache
    active: list[Choice] = field(default_factory=list)

    def admit(self, choice: Choice) -> bool:
        """Let it run, if there is a slot and room in the cache."""
        answer = choice.answer
        prompt = answer.request.prompt_token_ids
        if len(self.active) >= self.batch_size:
            return False
        lease = self.cache.lease(len(prompt) + answer.max_tokens, answer.request.cache_salt)
        if lease is None:
            return False
        choice.lease = lease
        answer.cached_tokens = self.cache.match(lease, prompt)
        choice.prefill_left = len(prompt) - answer.cached_tokens
        self.active.append(choice)
        return True

    def keep(self, choices: list[Choice]) -> None:
        """These go on; all others have ended."""
        kept = set(choices)
        for choice in self.active:
            assert choice.lease is not None, "it was admitted"
            full_count = choice.token_count // self.cache.block_size
            if not choice.prefill_left and full_count > len(choice.lease.hashes):
                self.cache.extend(choice.lease, [*choice.answer.request.prompt_token_ids, *choice.generated])
            if choice not in kept:
                self.cache.release(choice.lease)
        self.active = choices

    def used_count(self) -> int:
        """Blocks in use."""
        return self.cache.used_count([choice.token_count - choice.prefill_left for choice in self.active])


def wanted_rank(choice: Choice, ranks: list[Rank]) -> list[Rank]:
    """Those that may take it, the best first. Strict: only the one that was asked for, however long it takes."""
    scheduling = choice.answer.request.scheduling_params
    by_load = sorted(ranks, key=lambda rank: len(rank.active))
    if len(ranks) == 1 or scheduling is None or scheduling.attention_dp_rank is None:
        return by_load
    asked = [rank for rank in ranks if rank.index == scheduling.attention_dp_rank]
    return asked if scheduling.attention_dp_relax is False else asked + [rank for rank in by_load if rank not in asked]
