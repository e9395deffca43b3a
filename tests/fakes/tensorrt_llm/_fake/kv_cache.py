"""The key-value cache of one rank: counts and hashes of blocks, for there is nothing in them.

A block is shared by all answers that begin with the same tokens, and stays until its room is needed. What has begun is
never paused: an answer starts when there is room for all that it may become.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..llmapi.llm_args import KvCacheConfig
from .model import State


@dataclass(slots=True)
class Lease:
    """What one answer has of the cache. reserved: blocks it may come to need; hashes: of its full ones, in order."""

    reserved: int
    salt: int
    hashes: list[int] = field(default_factory=list)


class KvCache:
    """block_count: how many fit. rank: named in events. Of these the oldest are dropped where there are too many."""

    def __init__(self, config: KvCacheConfig, block_count: int, rank: int | None) -> None:
        self.block_count = block_count
        self.reserved_count = 0
        self.missed_count = 0
        self.reused_count = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=config.event_buffer_max_size)
        self._config = config
        self._rank = rank
        self._users: OrderedDict[int, int] = OrderedDict()  # By hash: how many use it. Least recently used first.
        self._event_count = 0
        self._tell({"type": "created", "num_blocks_per_cache_level": [block_count, 0]})

    @property
    def block_size(self) -> int:
        """Tokens."""
        return self._config.tokens_per_block

    def used_count(self, token_counts: Sequence[int]) -> int:
        """Blocks that answers of these lengths use, those shared counted once."""
        partial = sum(count % self.block_size > 0 for count in token_counts)
        return partial + sum(users > 0 for users in self._users.values())

    def blocks_of(self, token_count: int) -> int:
        return -(-token_count // self.block_size)

    def lease(self, token_count_max: int, salt: str | None) -> Lease | None:
        """Room for an answer of so many tokens, prompt included; None: not now."""
        needed = self.blocks_of(token_count_max)
        if self.reserved_count + needed > self.block_count:
            return None
        self.reserved_count += needed
        return Lease(needed, State().after(salt.encode()).value if salt else 0)

    def match(self, lease: Lease, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt need not be read. The last one always has to be."""
        if not self._config.enable_block_reuse:
            return 0
        count = 0
        for block_hash in self._hashes(lease, prompt)[: (len(prompt) - 1) // self.block_size]:
            if block_hash not in self._users:
                break
            count += 1
        self.reused_count += count
        self.missed_count += self.blocks_of(len(prompt)) - count
        return count * self.block_size

    def extend(self, lease: Lease, token_ids: Sequence[int]) -> None:
        """These have been computed, from the first on: full blocks among them become known."""
        for index, block_hash in enumerate(self._hashes(lease, token_ids)):
            if index < len(lease.hashes):
                continue
            parent = lease.hashes[-1] if lease.hashes else None
            lease.hashes.append(block_hash)
            if block_hash not in self._users:
                self._make_room()
                start = index * self.block_size
                self._tell(_stored(parent, block_hash, token_ids[start : start + self.block_size]))
            self._users[block_hash] = self._users.get(block_hash, 0) + 1
            self._users.move_to_end(block_hash)

    def release(self, lease: Lease) -> None:
        """The answer has ended; its blocks stay known as long as there is room."""
        self.reserved_count -= lease.reserved
        for block_hash in lease.hashes:
            self._users[block_hash] -= 1

    def take_events(self) -> list[dict[str, Any]]:
        """Those that nobody has taken yet."""
        events = list(self._events)
        self._events.clear()
        return events

    def _make_room(self) -> None:
        if len(self._users) < self.block_count:
            return
        unused = next((block_hash for block_hash, users in self._users.items() if not users), None)
        if unused is not None:
            del self._users[unused]
            self._tell({"type": "removed", "block_hashes": [unused]})

    def _hashes(self, lease: Lease, token_ids: Sequence[int]) -> list[int]:
        """Of the full blocks: each hash is over all tokens up to the block's end."""
        state, hashes = State(lease.salt), []
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            state = state.after(token_ids[start : start + self.block_size])
            hashes.append(state.value)
        return hashes

    def _tell(self, data: dict[str, Any]) -> None:
        event: dict[str, Any] = {"event_id": self._event_count, "data": data}
        if self._rank is not None:
            event["attention_dp_rank"] = self._rank
        self._event_count += 1
        self._events.append(event)


def _stored(parent: int | None, block_hash: int, token_ids: Sequence[int]) -> dict[str, Any]:
    tokens = [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in token_ids]
    block = {"type": "stored_block", "block_hash": block_hash, "tokens": tokens, "cache_level": 0, "priority": 35}
    return {"type": "stored", "parent_hash": parent, "blocks": [block]}
