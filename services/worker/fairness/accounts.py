"""The accounts of all tenants that a worker knows."""

from collections.abc import Collection, Iterator

from services.core.tenant import Tenant, TenantLabels
from services.worker.fairness.account import Account

TENANTS_MAX = 4096
"""How many tenants a worker knows, or twice as many as have requests, if that is more."""


class Accounts:
    """The accounts by the names of tenants.

    Beyond the bound, half of those without requests are forgotten: those with the lowest counters, because they would
    be lifted on their return anyway. What they have had stays in the totals.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Account] = {}
        self._forget_at = TENANTS_MAX
        self._labels = TenantLabels()
        self._past: dict[str, tuple[int, int]] = {}  # By label: input and output tokens of forgotten accounts.

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._by_name.values())

    def of(self, tenant: Tenant) -> Account:
        """The tenant's account, with the weight that the tenant has now. A new one is not kept before `keep`."""
        account = self._by_name.get(tenant.name)
        if account is None:
            return Account(tenant.name, tenant.weight)
        if account.weight != tenant.weight:
            account.reweigh(tenant.weight)
        return account

    def keep(self, account: Account, busy: Collection[Account]) -> None:
        """Keep a new account. `busy`: the accounts with requests, which are not forgotten."""
        account.label = self._labels.of(account.name)
        self._by_name[account.name] = account
        if len(self._by_name) > self._forget_at:
            self._forget({*busy, account})
            self._forget_at = max(TENANTS_MAX, 2 * len(busy))

    def totals(self) -> dict[str, tuple[int, int]]:
        """The input and output tokens of all tenants since the start, by label."""
        totals = dict(self._past)
        for account in self._by_name.values():
            _add(totals, account)
        return totals

    def _forget(self, busy: Collection[Account]) -> None:
        idle = sorted((one for one in self._by_name.values() if one not in busy), key=lambda one: one.counter)
        for account in idle[: (len(idle) + 1) // 2]:
            del self._by_name[account.name]
            _add(self._past, account)


def _add(totals: dict[str, tuple[int, int]], account: Account) -> None:
    assert account.label is not None, "`keep` sets it"
    input_tokens, output_tokens = totals.get(account.label, (0, 0))
    totals[account.label] = input_tokens + account.input_tokens, output_tokens + account.output_tokens
