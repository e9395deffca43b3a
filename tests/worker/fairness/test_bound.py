"""The bound of the paper: two tenants that wait get service by their weights, up to a constant, in every history."""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core.errors import Failure
from services.core.tenant import Tenant
from services.worker.dispatcher import Dispatcher, Limits

INPUT_MAX = 8
"""L_input: tokens of a prompt."""
OUTPUT_MAX = 12
"""Tokens of an answer."""
WEIGHTS = (1.0, 2.0, 0.5)
NAMES = st.sampled_from(range(len(WEIGHTS)))


@dataclass
class Sent:
    """A choice that was admitted. `left`: tokens that its answer still has."""

    tenant: int
    tokens: int
    left: int


@dataclass
class Interval:
    """While two tenants both wait: the least and the greatest difference of their service by weight since it began."""

    least: float
    greatest: float

    def add(self, difference: float) -> None:
        self.least, self.greatest = min(self.least, difference), max(self.greatest, difference)


@dataclass
class Service:
    """What a test counts by itself: 1 for a token of a prompt whose request starts, 2 for a token of an answer."""

    by_tenant: list[int] = field(default_factory=lambda: [0] * len(WEIGHTS))

    def weighted(self, tenant: int) -> float:
        return self.by_tenant[tenant] / WEIGHTS[tenant]


class FairService(RuleBasedStateMachine):
    """Theorem 4.4 of "Fairness in Serving Large Language Models" (arXiv 2401.00588), with weights.

    For two tenants f and g that both wait throughout any interval, with the service W and the weights w:

        |W_f / w_f - W_g / w_g| <= 2 * max(w_p * L_input, w_q * M) / min(w_f, w_g),  w_p = 1, w_q = 2

    L_input: tokens of the longest prompt. M: tokens that a running batch can hold; here N requests, each with its
    prompt and its answer. The machine also asserts the sharper bound from which this follows: a counter is at most
    U_i = (L_input + 2 * N * L_output) / w_i above the lowest of those that wait, because a tenant that is above it
    starts nothing, and what it runs can draw no more. So the difference moves by U_f + U_g at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()
        self.sent: dict[int, Sent] = {}
        self.intervals: dict[tuple[int, int], Interval] = {}
        self.next_key = 0

    @initialize(
        slots=st.integers(1, 3), places=st.sampled_from([3, 30, 30]), tokens=st.sampled_from([None, None, 20, 200])
    )
    def begin(self, slots: int, places: int, tokens: int | None) -> None:
        self.slots = slots
        limits = Limits(slots=slots, places=places, tokens=tokens)
        self.dispatcher = Dispatcher(limits, self.on_start, lambda: 0.0, self.on_displaced)

    def on_start(self, key: Any) -> None:
        self.service.by_tenant[self.sent[key].tenant] += self.sent[key].tokens

    def on_displaced(self, key: Any) -> None:
        del self.sent[key]

    @property
    def running(self) -> list[int]:
        return [key for key in self.sent if self.dispatcher.is_running(key)]

    @property
    def waiting(self) -> list[int]:
        return [key for key in self.sent if self.dispatcher.is_waiting(key)]

    # Events

    @rule(
        tenant=NAMES,
        requests=st.sampled_from([1, 12, 12]),
        choices=st.sampled_from([1, 1, 1, 2]),
        tokens=st.sampled_from([1, INPUT_MAX]),
        left=st.sampled_from([0, OUTPUT_MAX, OUTPUT_MAX]),
    )
    def arrive(self, tenant: int, requests: int, choices: int, tokens: int, left: int) -> None:
        for _ in range(requests):
            keys = range(self.next_key, self.next_key + choices)
            self.next_key += choices
            self.sent |= {key: Sent(tenant, tokens, left) for key in keys}
            try:
                self.dispatcher.admit(keys, tokens, Tenant(name=str(tenant), weight=WEIGHTS[tenant]))
            except Failure:
                self.sent = {key: sent for key, sent in self.sent.items() if key not in keys}
            self.look()

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), count=st.integers(1, OUTPUT_MAX))
    def draw(self, index: int, count: int) -> None:
        self.give(self.running[index % len(self.running)], count)

    @rule(number=st.sampled_from([1, 6, 6, 12]))
    def finish(self, number: int) -> None:
        """End running requests, the oldest first, each with its whole answer."""
        for key in (min(running) for _ in range(number) if (running := self.running)):
            self.give(key, self.sent[key].left)
            self.end(key)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9))
    def leave_running(self, index: int) -> None:
        self.end(self.running[index % len(self.running)])

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 40))
    def leave_waiting(self, index: int) -> None:
        self.end(self.waiting[index % len(self.waiting)])

    def give(self, key: int, count: int) -> None:
        sent = self.sent[key]
        count = min(count, sent.left)
        sent.left -= count
        self.dispatcher.account(key).output_tokens += count
        self.service.by_tenant[sent.tenant] += 2 * count
        self.look()

    def end(self, key: int) -> None:
        self.dispatcher.release(key)
        del self.sent[key]
        self.look()

    # What must hold

    def look(self) -> None:
        """Note the differences, and begin and end intervals."""
        tenants = {self.sent[key].tenant for key in self.waiting}
        for pair in combinations(range(len(WEIGHTS)), 2):
            if not tenants.issuperset(pair):
                self.intervals.pop(pair, None)
                continue
            difference = self.service.weighted(pair[0]) - self.service.weighted(pair[1])
            self.intervals.setdefault(pair, Interval(difference, difference)).add(difference)

    @invariant()
    def difference_never_exceeds_the_bound(self) -> None:
        batch = self.slots * (INPUT_MAX + OUTPUT_MAX)  # M
        for (f, g), interval in self.intervals.items():
            moved = interval.greatest - interval.least
            late = INPUT_MAX + 2 * self.slots * OUTPUT_MAX
            assert moved <= late / WEIGHTS[f] + late / WEIGHTS[g] + 1e-6
            assert moved <= 2 * max(INPUT_MAX, 2 * batch) / min(WEIGHTS[f], WEIGHTS[g]) + 1e-6


FairService.TestCase.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
TestFairService = FairService.TestCase
