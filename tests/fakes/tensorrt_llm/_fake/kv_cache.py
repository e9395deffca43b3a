"""The key-value cache of one rank: counts and hashes of blocks, without any content.

Answers that begin with the same tokens share blocks, and a block stays until its room is needed. Answers are never
paused: an answer starts when there is room for its maximum length.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..llmapi.llm_args import KvCacheConfig
from .model import State


@dataclass(slots=True)
class Allocation:
    """The blocks of one answer. `reserved`: blocks of its maximum length. `hashes`: of its full blocks, in order."""

    reserved: int
    salt: int
    hashes: list[int] = field(default_factory=list)


class KvCache:
    """The cache of one rank. `block_count`: its size. `rank`: named in events; the oldest events are dropped."""

    def __init__(self, config: KvCacheConfig, block_count: int, rank: int | None) -> None:
        self.block_count = block_count
        self.reserved_count = 0
        self.missed_count = 0
        self.reused_count = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=config.event_buffer_max_size)
        self._config = config
        self._rank = rank
        self._users: OrderedDict[int, int] = OrderedDict()  # Block hash → number of users, least recently used first.
        self._event_count = 0
        self._record_event({"type": "created", "num_blocks_per_cache_level": [block_count, 0]})

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._config.tokens_per_block

    def used_count(self, token_counts: Sequence[int]) -> int:
        """Blocks used by answers of these lengths; shared blocks count once."""
        partial = sum(count % self.block_size > 0 for count in token_counts)
        return partial + sum(users > 0 for users in self._users.values())

    def blocks_of(self, token_count: int) -> int:
        return -(-token_count // self.block_size)

    def allocate(self, token_count_max: int, salt: str | None) -> Allocation | None:
        """Reserve room for an answer of at most this many tokens, prompt included; None: there is no room now."""
        needed = self.blocks_of(token_count_max)
        if self.reserved_count + needed > self.block_count:
            return None
        self.reserved_count += needed
        return Allocation(needed, State().after(salt.encode()).value if salt else 0)

    def match(self, allocation: Allocation, prompt: Sequence[int]) -> int:
        """The number of prompt tokens that need not be computed. The last one is always computed."""
        if not self._config.enable_block_reuse:
            return 0
        count = 0
        for block_hash in self._hashes(allocation, prompt)[: (len(prompt) - 1) // self.block_size]:
            if block_hash not in self._users:
                break
            count += 1
        self.reused_count += count
        self.missed_count += self.blocks_of(len(prompt)) - count
        return count * self.block_size

    def extend(self, allocation: Allocation, token_ids: Sequence[int]) -> None:
        """Record that these tokens, from the first on, have been computed: their full blocks can be reused."""
        for index, block_hash in enumerate(self._hashes(allocation, token_ids)):
            if index < len(allocation.hashes):
                continue
            parent = allocation.hashes[-1] if allocation.hashes else None
            allocation.hashes.append(block_hash)
            if block_hash not in self._users:
                self._make_room()
                start = index * self.block_size
                self._record_event(_stored(parent, block_hash, token_ids[start : start + self.block_size]))
            self._users[block_hash] = self._users.get(block_hash, 0) + 1
            self._users.move_to_end(block_hash)

    def release(self, allocation: Allocation) -> None:
        """Release the room of an answer that has ended. Its blocks can be reused while there is room."""
        self.reserved_count -= allocation.reserved
        for block_hash in allocation.hashes:
            self._users[block_hash] -= 1

    def drain_events(self) -> list[dict[str, Any]]:
        """Return and remove all events."""
        events = list(self._events)
        self._events.clear()
        return events

    def _make_room(self) -> None:
        if len(self._users) < self.block_count:
            return
        unused = next((block_hash for block_hash, users in self._users.items() if not users), None)
        if unused is not None:
            del self._users[unused]
            self._record_event({"type": "removed", "block_hashes": [unused]})

    def _hashes(self, allocation: Allocation, token_ids: Sequence[int]) -> list[int]:
        """The hashes of the full blocks, each over all tokens up to the block's end."""
        state, hashes = State(allocation.salt), []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            state = state.after(token_ids[start : start + self.block_size])
            hashes.append(state.value)
        return hashes

    def _record_event(self, data: dict[str, Any]) -> None:
        event: dict[str, Any] = {"event_id": self._event_count, "data": data}
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        self._event_count += 1
        self._events.append(event)


def _stored(parent: int | None, block_hash: int, token_ids: Sequence[int]) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in token_ids]
    block = {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": parent, "blocks": [block]}
