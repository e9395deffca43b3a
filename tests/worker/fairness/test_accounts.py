"""Accounts: a worker knows a bounded number of tenants, and metrics name a bounded number of them."""

import pytest

from services.access.keys_file import TENANT_NAME
from services.core.tenant import OTHERS, Tenant
from services.worker.fairness import accounts as module
from services.worker.fairness.account import Account
from services.worker.fairness.accounts import Accounts


def known(accounts: Accounts, name: str, *, input_tokens: int = 0, busy: tuple[Account, ...] = ()) -> Account:
    """Keep an account for a new tenant."""
    account = accounts.of(Tenant(name=name))
    accounts.keep(account, busy)
    account.input_tokens = input_tokens
    return account


def names(accounts: Accounts) -> list[str]:
    return [account.name for account in accounts]


def test_tenant_has_one_account_with_its_present_weight() -> None:
    accounts = Accounts()
    first = known(accounts, "a")

    again = accounts.of(Tenant(name="a", weight=3.0))

    assert again is first
    assert again.weight == 3.0


def test_account_is_not_kept_before_a_request_is_admitted() -> None:
    accounts = Accounts()

    account = accounts.of(Tenant(name="a"))

    assert account.label is None
    assert len(accounts) == 0


def test_beyond_the_bound_the_idle_tenants_with_the_lowest_counters_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 4)
    accounts = Accounts()
    for name, tokens in (("much", 9), ("less", 2), ("least", 1), ("more", 5)):
        known(accounts, name, input_tokens=tokens)

    known(accounts, "new")

    assert names(accounts) == ["much", "more", "new"]


def test_tenant_with_requests_is_never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 2)
    accounts = Accounts()
    busy = tuple(known(accounts, name) for name in "ab")

    known(accounts, "c", input_tokens=1, busy=busy)
    assert names(accounts) == ["a", "b", "c"]
    for name in "defg":
        known(accounts, name, busy=busy)

    assert {"a", "b"} <= set(names(accounts))
    assert len(accounts) <= 2 * len(busy) + 1


def test_number_of_known_tenants_is_bounded_however_many_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 10)
    accounts = Accounts()

    sizes = []
    for number in range(1000):
        known(accounts, str(number))
        sizes.append(len(accounts))

    assert max(sizes) == 10


def test_totals_keep_what_forgotten_tenants_have_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TENANTS_MAX", 1)
    accounts = Accounts()
    known(accounts, "a", input_tokens=3).output_tokens = 2
    known(accounts, "b", input_tokens=1)
    assert names(accounts) == ["b"]

    known(accounts, "a", input_tokens=4)

    assert accounts.totals() == {"a": (7, 2), "b": (1, 0)}


def test_first_tenants_have_a_label_and_all_others_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.core.tenant.LABELS_MAX", 2)
    accounts = Accounts()

    for number, name in enumerate("abcd", start=1):
        known(accounts, name, input_tokens=number)

    assert accounts.totals() == {"a": (1, 0), "b": (2, 0), OTHERS: (7, 0)}


def test_shared_label_can_be_no_tenants_name() -> None:
    """A bug: what a tenant called `other` had was mixed with what the tenants without a label had."""
    assert TENANT_NAME.fullmatch(OTHERS) is None
