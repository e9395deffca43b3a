"""The dispatcher with several tenants: exact N + Q in every history, and the order of the obvious model."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import Failure, Reason, RefusedFor
from services.core.tenant import EVERYBODY, Tenant
from services.worker.dispatcher import Dispatcher, Limits

TENANTS = (Tenant(name="a"), Tenant(name="b", weight=3.0), Tenant(name="c", weight=0.5), EVERYBODY)
A, B, C, _ = TENANTS


class Case:
    """A dispatcher, and what it told, in order."""

    def __init__(self, slots: int, places: int, tokens: int | None = None) -> None:
        self.started: list[Any] = []
        self.displaced: list[Any] = []
        limits = Limits(slots=slots, places=places, tokens=tokens)
        self.dispatcher = Dispatcher(limits, self.started.append, lambda: 0.0, self.displaced.append)

    @property
    def counts(self) -> tuple[int, int]:
        return self.dispatcher.running_count, self.dispatcher.waiting_count

    def admit(self, tenant: Tenant, *keys: Any, tokens: int = 1) -> Failure | None:
        """The failure that refuses a group; None: the group is admitted."""
        try:
            self.dispatcher.admit(keys, tokens, tenant)
        except Failure as failure:
            return failure
        return None


@dataclass(frozen=True)
class Item:
    """One choice of a request."""

    key: Any
    group: int
    tenant: Tenant
    tokens: int


class Model:
    """The obvious implementation: all that wait in one list, in order of arrival, and a counter for each tenant."""

    def __init__(self, slots: int, places: int, tokens: int | None) -> None:
        self.slots, self.places = slots, places
        self.tokens = float("inf") if tokens is None else tokens
        self.running: list[Item] = []
        self.waiting: list[Item] = []
        self.counters = dict.fromkeys(TENANTS, 0.0)
        self.last_out: Tenant | None = None
        self.started: list[Any] = []
        self.displaced: list[Any] = []

    # Order

    def join(self, item: Item) -> None:
        those = {one.tenant for one in self.waiting} or {self.last_out or item.tenant}
        if item.tenant not in those:
            self.counters[item.tenant] = max(self.counters[item.tenant], min(self.counters[one] for one in those))
        self.waiting.append(item)

    def leave(self, item: Item) -> None:
        self.waiting.remove(item)
        self.last_out = item.tenant

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            first = min(self.waiting, key=lambda one: self.counters[one.tenant])
            self.leave(first)
            self.running.append(first)
            self.serve(first, first.tokens)
            self.started.append(first.key)

    def serve(self, item: Item, service: int) -> None:
        self.counters[item.tenant] += service / item.tenant.weight

    # N + Q

    def admit(self, group: list[Item]) -> str | None:
        """Admit a group as a whole, or change nothing. Returns why not."""
        left, stays = group[self.slots - len(self.running) :], self.waiting
        if not self._fits(group[self.slots :]):
            return Reason.INVALID_ARGUMENT
        is_for_places = len(stays) + len(left) > self.places
        while not self._fits([*stays, *left]):
            measure = (lambda one: 1) if len(stays) + len(left) > self.places else (lambda one: one.tokens)
            held = {tenant: self._share([*stays, *left], tenant, measure) for tenant in self.counters}
            own = held[left[0].tenant]
            held = {one.tenant: held[one.tenant] for one in stays if one.tenant != left[0].tenant}
            most = max(held, key=lambda one: (held[one], self.counters[one]), default=None)
            if most is None or held[most] <= own:
                return RefusedFor.CAPACITY if is_for_places else RefusedFor.QUEUE_TOKENS
            newest = [one for one in stays if one.tenant == most][-1].group
            stays = [one for one in stays if one.group != newest]
        for item in [one for one in self.waiting if one not in stays]:
            self.leave(item)
            self.displaced.append(item.key)
        for item in group:
            self.join(item)
            self.fill()
        return None

    def _fits(self, waiting: list[Item]) -> bool:
        return len(waiting) <= self.places and sum(one.tokens for one in waiting) <= (self.tokens if waiting else 0)

    def _share(self, items: list[Item], tenant: Tenant, measure: Any) -> float:
        own = [one for one in items if one.tenant == tenant]
        return float(sum(measure(one) for one in own if one.group != own[0].group) / tenant.weight)


ADMIT = st.tuples(st.just("admit"), st.sampled_from([1, 1, 1, 2, 3, 6]), st.integers(1, 4))
OTHERS = st.tuples(
    st.sampled_from(["serve", "release running", "release waiting"]), st.integers(0, 9), st.integers(1, 9)
)


@settings(max_examples=300)
@given(
    slots=st.integers(1, 3),
    places=st.integers(0, 6),
    tokens=st.none() | st.integers(0, 12),
    events=st.lists(st.tuples(st.sampled_from(TENANTS), ADMIT | OTHERS), max_size=40),
)
def test_dispatcher_agrees_with_the_obvious_model_for_any_tenants_and_order_of_events(
    slots: int, places: int, tokens: int | None, events: list[tuple[Tenant, tuple[str, int, int]]]
) -> None:
    """Order, verdicts and their causes, who gives way, exact counts, and no leak."""
    case, model = Case(slots, places, tokens), Model(slots, places, tokens)

    for number, (tenant, (event, choice, amount)) in enumerate(events):
        pool = model.waiting if event == "release waiting" else model.running
        if event == "admit":
            group = [Item((number, one), number, tenant, amount) for one in range(choice)]
            refusal = case.admit(tenant, *(one.key for one in group), tokens=amount)
            assert (refusal and refusal.metadata.get("cause", refusal.reason)) == model.admit(group)
        elif pool:
            item = pool[choice % len(pool)]
            if event == "serve":
                case.dispatcher.account(item.key).output_tokens += amount
                model.serve(item, 2 * amount)
            else:
                case.dispatcher.release(item.key)
                model.running.remove(item) if item in model.running else model.leave(item)
                model.fill()
        assert case.started == model.started
        assert sorted(case.displaced) == sorted(model.displaced)
        assert case.counts == (len(model.running), len(model.waiting))
        assert case.counts[0] <= slots
        assert case.counts[1] <= places

    for item in [*model.waiting, *model.running]:
        case.dispatcher.release(item.key)
    assert case.counts == (0, 0)
    assert case.dispatcher.refusal(RefusedFor.CAPACITY, "").metadata.get("waiting_tokens", "0") == "0"


def test_light_tenant_does_not_wait_for_all_that_the_heavy_one_has_sent_before() -> None:
    case = Case(slots=1, places=9)
    for number in range(8):
        case.admit(A, f"a{number}", tokens=10)
    case.admit(B, "b0", tokens=10)

    case.dispatcher.release("a0")
    case.dispatcher.release("a1")

    assert case.started == ["a0", "a1", "b0"]


def test_full_queue_stays_exactly_full_when_a_request_gives_way() -> None:
    case = Case(slots=1, places=3)
    for number in range(4):
        assert case.admit(A, f"a{number}") is None

    assert case.admit(B, "b0") is None
    assert case.displaced == ["a3"]
    assert case.counts == (1, 3)
    assert not case.dispatcher.is_waiting("a3")

    case.dispatcher.release("a3")
    assert case.counts == (1, 3), "a request that gave way holds nothing that it could give back"


def test_refused_newcomer_changes_nothing_and_is_told_the_bound_as_ever() -> None:
    case = Case(slots=1, places=2)
    for key, tenant in (("a0", A), ("a1", A), ("b0", B)):
        case.admit(tenant, key)

    refusal = case.admit(A, "a2")

    assert refusal is not None
    assert refusal.metadata["cause"] == RefusedFor.CAPACITY
    assert (case.displaced, case.counts) == ([], (1, 2))


def test_refused_newcomers_leave_no_account_behind() -> None:
    case = Case(slots=1, places=0)
    case.admit(A, "a0")

    for number in range(100):
        assert case.admit(Tenant(name=f"t{number}"), number) is not None

    assert list(case.dispatcher.usage()) == ["a"]


def test_usage_has_what_each_tenant_has_had_and_has_waiting() -> None:
    case = Case(slots=1, places=3)
    case.admit(A, "a0", tokens=5)
    case.dispatcher.account("a0").output_tokens += 2
    case.admit(B, "b0", "b1", tokens=7)

    usage = case.dispatcher.usage()

    assert {name: (one.input_tokens, one.output_tokens, one.waiting_count) for name, one in usage.items()} == {
        "a": (5, 2, 0),
        "b": (0, 0, 2),
    }


@pytest.mark.parametrize("tenant", [EVERYBODY, Tenant(name="t", weight=7.0)])
def test_with_one_tenant_none_gives_way(tenant: Tenant) -> None:
    case = Case(slots=2, places=3)

    refused = [key for key in range(50) if case.admit(tenant, key) is not None]

    assert refused == list(range(5, 50))
    assert (case.displaced, case.counts) == ([], (2, 3))
