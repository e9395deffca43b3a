"""The waiting requests of all tenants: one queue for each, and the tenant that has had the least service is next.

This is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024, arXiv
2401.00588), algorithm 2, with weights. A tenant's counter is its service divided by its weight: 1 for each token of a
prompt, when its request gets a slot, and 2 for each token of an answer, as it leaves the engine.

| event | the tenant's counter |
| --- | --- |
| it begins to wait, others wait | is lifted to the lowest counter of those that wait |
| it begins to wait, nobody waits | is lifted to the counter of the last that left the queue |
| it finds a free slot | as if it had begun to wait, and had left the queue at once |
| it has requests waiting already | stays |

So service that nobody else wanted is not held against a tenant, and nobody can save up by staying away.
"""

from collections.abc import Collection, Hashable
from itertools import count

from services.worker.fairness.account import Account, WaitingGroup


class FairQueue:
    """The waiting requests. Its length is how many wait. `tokens`: of their prompts."""

    def __init__(self) -> None:
        self.tokens = 0
        self._account_of: dict[Hashable, Account] = {}  # Of each waiting request.
        self._accounts: dict[Account, None] = {}  # With requests that wait.
        self._last_out: Account | None = None
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._account_of)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._account_of

    @property
    def accounts(self) -> Collection[Account]:
        """The accounts of tenants that wait."""
        return self._accounts.keys()

    def has_others(self, account: Account) -> bool:
        """Whether any other tenant waits."""
        return len(self._accounts) > (account in self._accounts)

    def new_group(self, tokens: int) -> WaitingGroup:
        """The group of a request that arrives now. `tokens`: of its prompt."""
        return WaitingGroup(next(self._numbers), tokens)

    def push(self, key: Hashable, account: Account, group: WaitingGroup) -> None:
        """Let a request of the tenant wait."""
        if not account.queue:
            if account is not self._last_out or self._accounts:
                self._lift(account)
            self._accounts[account] = None
        account.queue[key] = group
        account.waiting_tokens += group.tokens
        self.tokens += group.tokens
        self._account_of[key] = account

    def pass_through(self, account: Account) -> None:
        """A request of the tenant has found a free slot. Nobody waits then."""
        if account is not self._last_out:
            self._lift(account)
            self._last_out = account

    def pop(self) -> tuple[Hashable, Account, WaitingGroup]:
        """Remove the first request of the tenant with the lowest counter; of equals, the one that came first."""
        if len(self._accounts) == 1:
            (account,) = self._accounts
        else:
            account = min(self._accounts, key=lambda one: (one.counter, one.first.number))
        key, group = account.queue.popitem(last=False)
        self._removed(key, account, group)
        return key, account, group

    def remove(self, key: Hashable) -> None:
        """Remove a request that waits no more. Ignored if it does not wait."""
        if (account := self._account_of.get(key)) is not None:
            self._removed(key, account, account.queue.pop(key))

    def _removed(self, key: Hashable, account: Account, group: WaitingGroup) -> None:
        del self._account_of[key]
        account.waiting_tokens -= group.tokens
        self.tokens -= group.tokens
        if not account.queue:
            del self._accounts[account]
            self._last_out = account

    def _lift(self, account: Account) -> None:
        if self._accounts:
            account.lift(min(one.counter for one in self._accounts))
        elif self._last_out is not None:
            account.lift(self._last_out.counter)
