"""Which waiting requests give way to a newcomer when the queue is full.

| the newcomer's tenant | what happens |
| --- | --- |
| holds as much as the tenant that holds most, with the newcomer | the newcomer is refused |
| holds less | the newest request of the tenant that holds most gives way |
| holds less, and still there is no room | the newest request of the tenant that holds most then, and so on |

What a tenant holds is what its waiting requests take beyond the first of them, divided by its weight: in places, or in
prompt tokens if the limit of those is met. So a tenant's first waiting request never gives way, however small its
weight. A request gives way with all its choices that wait, and only to a newcomer that then has room.
"""

from collections.abc import Callable, Collection, Hashable, Sequence

from services.worker.fairness.account import Account


class Holding:
    """What a tenant holds of the queue.

    `count`, `tokens`: the choices of a newcomer that would have to wait, and the prompt tokens of each of them.
    """

    __slots__ = ("_first_places", "_first_tokens", "_newest_first", "_places", "_tokens", "account")

    def __init__(self, account: Account, count: int = 0, tokens: int = 0) -> None:
        self.account = account
        self._places = len(account.queue) + count
        self._tokens = account.waiting_tokens + count * tokens
        if account.queue:
            count, tokens = account.first_count, account.first.tokens
        self._first_places, self._first_tokens = count, count * tokens
        self._newest_first = account.newest_first()

    def places_share(self) -> float:
        return (self._places - self._first_places) / self.account.weight

    def tokens_share(self) -> float:
        return (self._tokens - self._first_tokens) / self.account.weight

    def give_way(self) -> tuple[Sequence[Hashable], int]:
        """Take the newest waiting request away. Returns its keys and their prompt tokens."""
        keys = next(self._newest_first)
        tokens = len(keys) * self.account.queue[keys[0]].tokens
        self._places -= len(keys)
        self._tokens -= tokens
        return keys, tokens


def displaced_by(
    newcomer: Holding, missing_places: int, missing_tokens: int, waiting: Collection[Account]
) -> Sequence[Hashable] | None:
    """The keys of the requests that give way; None if the newcomer is refused.

    `missing_places`, `missing_tokens`: the room that the newcomer lacks; 0 or less: it lacks none. `waiting`: the
    accounts with requests that wait.
    """
    others = [Holding(account) for account in waiting if account is not newcomer.account]
    displaced: list[Hashable] = []
    while missing_places > 0 or missing_tokens > 0:
        share = Holding.places_share if missing_places > 0 else Holding.tokens_share
        most = _with_most(others, share)
        if most is None or share(most) <= share(newcomer):
            return None
        keys, tokens = most.give_way()
        displaced += keys
        missing_places -= len(keys)
        missing_tokens -= tokens
    return displaced


def _with_most(holdings: Sequence[Holding], share: Callable[[Holding], float]) -> Holding | None:
    """The one that holds most; of equals, the one whose tenant has had more service."""
    return max(holdings, key=lambda one: (share(one), one.account.counter), default=None)
