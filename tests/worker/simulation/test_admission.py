"""Admission as a whole: exact in every history, on an engine that the test steps and a clock that it controls.

Workload: requests with one choice and with several, with and without deadlines. Nemesis: clients leave, tokens and ends
arrive in any order, and time jumps, with turns of the loop in between or all within one turn. Checker: CheckedEngine at
every call, and Model after every event.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.call import Phase
from services.core.choice_group import ChoiceGroup
from services.core.common_layers import Deadline
from services.core.errors import Failure, Reason
from services.core.request import FinishReason, Request
from services.worker.dispatcher import Limits
from services.worker.execute import Execute
from tests.support.clock import pass_time, run_clocked, settle
from tests.support.doubles import call_layer, make_request
from tests.support.manual_worker import ManualEngine

WAIT_S = 6.0
DONE, LEFT = "done", "left"


class Name(NamedTuple):
    """The name of one choice of a request. The token of its prompt identifies the request."""

    prompt: int
    choice: int


def name_of(request: Request) -> Name:
    return Name(request.prompt_token_ids[0], request.choice)


@dataclass(eq=False)
class SentChoice:
    """One choice that was sent. `outcome`: a reason, DONE or LEFT; None: none yet."""

    name: Name
    tokens: int
    deadline: float | None
    arrived_at: float = 0.0
    outcome: str | None = None
    task: asyncio.Task[None] = field(init=False)

    def is_overdue(self, now: float) -> bool:
        return now >= self.arrived_at + WAIT_S or self.is_late(now)

    def is_late(self, now: float) -> bool:
        return self.deadline is not None and now >= self.deadline


class CheckedEngine(ManualEngine):
    """Records violations: a request beyond N, one whose client has left or is overdue, or a cancel of an unknown one.

    An exception in an engine becomes the request's failure and would not fail the test.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.sent: dict[Name, SentChoice] = {}
        self.started: list[Name] = []
        self.violations: list[str] = []
        self._slots = slots
        self._known: set[int] = set()

    def submit(self, key: int, request: Request) -> None:
        super().submit(key, request)
        self._known.add(key)
        sent = self.sent[name_of(request)]
        self.started.append(sent.name)
        self._must(len(self.requests) <= self._slots, "more than N requests on the engine")
        self._must(not sent.task.cancelling(), f"the client of {sent.name} has left")
        self._must(not sent.is_overdue(asyncio.get_running_loop().time()), f"{sent.name} was overdue")

    def cancel(self, key: int) -> None:
        self._must(key in self._known, f"{key} was never submitted")
        super().cancel(key)

    def _must(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.violations.append(otherwise)


class World:
    """A worker's admission, and all choices that were sent to it."""

    def __init__(self, group: asyncio.TaskGroup, limits: Limits) -> None:
        self.limits = limits
        self.engine = CheckedEngine(limits.slots)
        self.execute = Execute(self.engine, limits)
        self.engine.attach(self.execute.emit)
        self._group = group

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def sent(self) -> list[SentChoice]:
        return list(self.engine.sent.values())

    def send(self, count: int, tokens: int, left_s: int | None) -> list[SentChoice]:
        """Send a request with `count` choices, each in a task like those of a session."""
        prompt, choice_group = len(self.engine.sent) + 1, ChoiceGroup(count)
        deadline = None if left_s is None else self.now + left_s
        choices = [SentChoice(Name(prompt, choice), tokens, deadline, self.now) for choice in range(count)]
        for one in choices:
            self.engine.sent[one.name] = one
            one.task = self._group.create_task(self._run(one, choice_group))
            one.task.add_done_callback(partial(self._end, one, choice_group))
        return choices

    async def _run(self, sent: SentChoice, choice_group: ChoiceGroup) -> None:
        sent.arrived_at = self.now
        request = make_request(prompt=(sent.name.prompt,) * sent.tokens, choice=sent.name.choice)
        try:
            await call_layer(Deadline(self.execute), request, choice_group=choice_group, deadline=sent.deadline)
            sent.outcome = DONE
        except Failure as failure:
            sent.outcome = failure.reason

    def _end(self, sent: SentChoice, choice_group: ChoiceGroup, _: asyncio.Task[None]) -> None:
        choice_group.leave(sent.name.choice)
        sent.outcome = sent.outcome or LEFT

    def finish(self, index: int) -> Name | None:
        """End one request on the engine. Returns its name."""
        if not self.engine.requests:
            return None
        key = list(self.engine.requests)[index % len(self.engine.requests)]
        name = name_of(self.engine.requests[key])
        self.engine.give(key, [7], FinishReason.STOP)
        return name

    def give(self, index: int) -> None:
        """Emit a token for one request on the engine."""
        if self.engine.requests:
            self.engine.give(list(self.engine.requests)[index % len(self.engine.requests)], [7])

    def leave(self, index: int) -> Name | None:
        """Cancel one choice that has no outcome yet. Returns its name."""
        inside = [one for one in self.sent if one.outcome is None]
        if not inside:
            return None
        inside[index % len(inside)].task.cancel()
        return inside[index % len(inside)].name

    def check(self) -> None:
        assert not self.engine.violations
        assert self.execute.running_count <= self.limits.slots
        assert self.execute.waiting_count <= self.limits.places

    def check_quiet(self) -> None:
        """Check that nothing is left once all clients have left."""
        self.check()
        counters = self.execute.counters
        outcomes = [one.outcome for one in self.sent]
        assert (self.execute.running_count, self.execute.waiting_count) == (0, 0), "a slot or a place leaked"
        assert self.engine.requests == {}, "the engine still has requests"
        assert all(outcomes)
        assert counters.refused + counters.queue_timeouts >= outcomes.count(Reason.WORKER_AT_CAPACITY)
        on_engine = (Phase.PREFILL, Phase.RUNNING)
        assert counters.aborted == sum(count for (_, phase), count in counters.cancelled.items() if phase in on_engine)
        assert counters.aborted + outcomes.count(DONE) <= len(self.engine.started)


class Model:
    """The obvious implementation of admission. Timers that become due between two events fire at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running: list[SentChoice] = []
        self.waiting: list[SentChoice] = []
        self.started: list[Name] = []
        self.outcomes: dict[Name, str] = {}

    def send(self, group: list[SentChoice]) -> None:
        """Admit the group as a whole, or change nothing but its outcomes."""
        if not self._fits(self.running, self.waiting, group):
            is_possible = self._fits([], [], group)
            reason = Reason.WORKER_AT_CAPACITY if is_possible else Reason.INVALID_ARGUMENT
            self.outcomes |= {one.name: reason for one in group}
        else:
            self.waiting += group
        self._fill()

    def _fits(self, running: list[SentChoice], waiting: list[SentChoice], group: list[SentChoice]) -> bool:
        left = [*waiting, *group][self.limits.slots - len(running) :]
        if len(left) > self.limits.places:
            return False
        return self.limits.tokens is None or not left or sum(one.tokens for one in left) <= self.limits.tokens

    def drop(self, name: Name, outcome: str) -> None:
        self.outcomes[name] = outcome
        self.running = [one for one in self.running if one.name != name]
        self.waiting = [one for one in self.waiting if one.name != name]
        self._fill()

    def advance(self, now: float) -> None:
        for one in [*self.running, *self.waiting]:
            if one.is_late(now):
                self.outcomes[one.name] = Reason.DEADLINE_EXCEEDED
            elif one in self.waiting and one.is_overdue(now):
                self.outcomes[one.name] = Reason.WORKER_AT_CAPACITY
        self.running = [one for one in self.running if one.name not in self.outcomes]
        self.waiting = [one for one in self.waiting if one.name not in self.outcomes]
        self._fill()

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.limits.slots:
            self.running.append(self.waiting.pop(0))
            self.started.append(self.running[-1].name)


INDEX = st.integers(0, 9)
EVENTS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("send"), st.sampled_from([1, 1, 2, 3, 7]), st.integers(1, 4), st.none() | st.integers(1, 8)),
    st.tuples(st.just("send"), st.just(1), st.just(1), st.none() | st.integers(1, 8)),
    st.tuples(st.just("finish"), INDEX),
    st.tuples(st.just("give"), INDEX),
    st.tuples(st.just("leave"), INDEX),
    st.tuples(st.just("pass"), st.integers(1, 4)),
)
LIMITS = st.builds(
    Limits,
    slots=st.integers(1, 5),
    places=st.integers(0, 5),
    tokens=st.none() | st.integers(0, 12),
    wait_s=st.just(WAIT_S),
)


def play(limits: Limits, history: Callable[[World], Any]) -> None:
    """Play the history, then let all clients leave."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            world = World(group, limits)
            await history(world)
            for one in world.sent:
                one.task.cancel()
        await settle()
        world.check_quiet()

    run_clocked(run())


@settings(max_examples=300)
@given(limits=LIMITS, events=st.lists(EVENTS, max_size=30))
def test_admission_agrees_with_the_obvious_model_in_every_history(
    limits: Limits, events: list[tuple[Any, ...]]
) -> None:
    """Compares admissions, refusals and their reasons, starts and their order, and all outcomes."""

    async def history(world: World) -> None:
        model = Model(limits)
        for event in events:
            happen(world, model, *event)
            await settle()
            world.check()
            assert world.engine.started == model.started
            assert {name_of(request) for request in world.engine.requests.values()} == {
                one.name for one in model.running
            }
            assert world.execute.waiting_count == len(model.waiting)
            outcomes = {one.name: one.outcome for one in world.sent if one.outcome is not None}
            assert outcomes == model.outcomes
            counters, reasons = world.execute.counters, list(outcomes.values())
            assert counters.refused + counters.queue_timeouts == reasons.count(Reason.WORKER_AT_CAPACITY)
            assert counters.aborted + reasons.count(DONE) == len(model.started) - len(model.running)

    play(limits, history)


def happen(world: World, model: Model, event: str, *values: Any) -> None:
    """Apply one event to the world and to its model."""
    match event:
        case "send":
            model.send(world.send(*values))
        case "pass":
            pass_time(*values)
            model.advance(world.now)
        case "give":
            world.give(*values)
        case "finish":
            if (name := world.finish(*values)) is not None:
                model.drop(name, DONE)
        case "leave":
            if (name := world.leave(*values)) is not None:
                model.drop(name, LEFT)


@settings(max_examples=300)
@given(limits=LIMITS, events=st.lists(EVENTS | st.just(("turn",)), max_size=40))
def test_events_within_one_turn_of_the_loop_break_no_bound_and_leak_nothing(
    limits: Limits, events: list[tuple[Any, ...]]
) -> None:
    """There is no model here, because the order within a turn is free. CheckedEngine and `check` hold for any order."""

    async def history(world: World) -> None:
        doing: dict[str, Callable[..., Any]] = {
            "send": world.send,
            "pass": pass_time,
            "give": world.give,
            "finish": world.finish,
            "leave": world.leave,
        }
        for event, *values in events:
            if event == "turn":
                await asyncio.sleep(0)
            else:
                doing[event](*values)
            world.check()

    play(limits, history)
