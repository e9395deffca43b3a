"""The limits of tenants: what each has used here, and what it is told when it has used up all."""

import random
from collections.abc import Callable

import pytest

from services.core.errors import Failure, Reason
from services.core.tenant import OTHERS, Allowance, Tenant
from services.frontend.limits import tenant_limits
from services.frontend.limits.tenant_limits import AT_ONCE, Grant, TenantLimits


class Clock:
    """`now`: what it shows."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(count: Callable[[], int] = lambda: 1) -> tuple[TenantLimits, Clock]:
    clock = Clock()
    return TenantLimits(count, random.Random(0), clock), clock


def refusal(limits: TenantLimits, tenant: Tenant, tokens: int = 1) -> Failure:
    with pytest.raises(Failure) as caught:
        limits.admit(tenant, tokens)
    return caught.value


def admitted(limits: TenantLimits, tenant: Tenant, tries: int) -> int:
    """How many of some requests are let in. They go on."""
    count = 0
    for _ in range(tries):
        try:
            limits.admit(tenant, 1)
        except Failure:
            continue
        count += 1
    return count


BY_REQUESTS = Tenant(name="acme", requests_per_minute=60)
BY_TOKENS = Tenant(name="acme", tokens_per_minute=600)
BY_NUMBER = Tenant(name="acme", requests_at_once=3)


@pytest.mark.parametrize(("processes", "expected"), [(1, 60), (2, 30), (7, 8)])
def test_rate_is_shared_by_the_frontends(processes: int, expected: int) -> None:
    limits, _ = make(lambda: processes)

    assert admitted(limits, BY_REQUESTS, 100) == expected


@pytest.mark.parametrize(("processes", "expected"), [(1, 3), (2, 2), (7, 1)])
def test_number_at_a_time_is_shared_and_rounded_up(processes: int, expected: int) -> None:
    limits, _ = make(lambda: processes)

    assert admitted(limits, BY_NUMBER, 100) == expected


def test_request_that_has_ended_makes_room_for_another() -> None:
    limits, _ = make()
    grants = [limits.admit(BY_NUMBER, 1) for _ in range(3)]
    failure = refusal(limits, BY_NUMBER)
    grants[1].leave()

    limits.admit(BY_NUMBER, 1)

    assert failure.metadata == {"cause": AT_ONCE, "limit": "3", "value": "3"}


def test_refusal_names_the_bound_its_limit_what_is_used_and_when_to_come_again() -> None:
    limits, clock = make(lambda: 2)
    admitted(limits, BY_REQUESTS, 30)
    clock.now = 1.0

    failure = refusal(limits, BY_REQUESTS)

    assert failure.reason is Reason.RATE_LIMITED
    assert failure.metadata == {"cause": "requests_per_minute", "limit": "60", "value": "59"}
    assert failure.retry_after_s == pytest.approx(1.0)
    assert "shared by 2 frontend processes" in failure.detail


def test_client_that_comes_when_it_is_told_is_served() -> None:
    limits, clock = make()
    admitted(limits, BY_REQUESTS, 60)
    failures = [refusal(limits, BY_REQUESTS) for _ in range(5)]

    for failure in failures:
        assert failure.retry_after_s is not None
        clock.now = failure.retry_after_s + 1e-6
        limits.admit(BY_REQUESTS, 1)


def test_refused_request_takes_nothing() -> None:
    limits, clock = make()
    both = Tenant(name="acme", requests_per_minute=60, tokens_per_minute=60)
    limits.admit(both, 100)
    for _ in range(10):
        assert refusal(limits, both).metadata["cause"] == "tokens_per_minute"
    clock.now = 120.0

    assert admitted(limits, both, 100) == 60


def test_tokens_are_charged_when_a_request_is_let_in_and_as_they_are_delivered() -> None:
    limits, clock = make()
    grant = limits.admit(BY_TOKENS, 100)
    grant.settle(200)
    grant.use(500)
    grant.leave()

    failure = refusal(limits, BY_TOKENS)

    assert failure.metadata == {"cause": "tokens_per_minute", "limit": "600", "value": "700"}
    assert failure.retry_after_s == pytest.approx(10.1)
    clock.now = 10.2
    limits.admit(BY_TOKENS, 1)


def give_back(grant: Grant) -> None:
    grant.give_back()
    grant.leave()


def test_request_that_is_given_back_counts_for_nothing() -> None:
    limits, _ = make()
    both = Tenant(name="acme", requests_per_minute=1, tokens_per_minute=1, requests_at_once=1)
    for _ in range(3):
        give_back(limits.admit(both, 1000))

    limits.admit(both, 1000)


def test_resumed_answer_is_let_in_and_counts_as_one_at_a_time() -> None:
    limits, _ = make()
    for _ in range(3):
        limits.resume(BY_NUMBER)

    assert refusal(limits, BY_NUMBER).metadata["cause"] == AT_ONCE
    limits.resume(BY_NUMBER)


def test_tenants_do_not_share_what_they_have() -> None:
    limits, _ = make()
    admitted(limits, BY_REQUESTS, 100)

    assert admitted(limits, Tenant(name="other", requests_per_minute=60), 100) == 60


def test_change_of_a_limit_counts_from_the_next_request_on() -> None:
    limits, _ = make()
    admitted(limits, BY_REQUESTS, 30)

    assert admitted(limits, Tenant(name="acme", requests_per_minute=6), 100) == 3
    assert admitted(limits, Tenant(name="acme"), 100) == 100


def test_allowances_are_of_the_whole_limit() -> None:
    limits, _ = make(lambda: 2)
    both = Tenant(name="acme", requests_per_minute=60, tokens_per_minute=600)
    limits.admit(both, 100)

    assert limits.allowances(both) == [Allowance("requests", 60, 58, 2.0), Allowance("tokens", 600, 400, 20.0)]
    assert limits.allowances(Tenant(name="free")) == []


def test_tenants_that_have_used_nothing_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_limits, "STATES_KEPT", 10)
    limits, clock = make()
    limits._forget_at = 10
    busy = limits.admit(Tenant(name="busy", requests_per_minute=60), 1)
    for number in range(100):
        clock.now = 60.0 * number
        limits.admit(Tenant(name=f"t{number}", requests_per_minute=60), 1).leave()

    assert len(limits._states) <= 11
    assert "busy" in limits._states
    busy.leave()


def test_metrics_name_only_so_many_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.core.tenant.LABELS_MAX", 2)
    limits, _ = make()
    for name in ("a", "b", "c", "d", "a"):
        tenant = Tenant(name=name, requests_at_once=1)
        limits.resume(tenant)
        refusal(limits, tenant)

    assert limits.refusals == {("a", AT_ONCE): 2, ("b", AT_ONCE): 1, (OTHERS, AT_ONCE): 2}
