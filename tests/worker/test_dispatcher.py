"""The dispatcher: at most N requests run and Q wait, in order of arrival, whatever requests come and go."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.errors import Failure, Reason, RefusedFor
from services.worker import dispatcher as module
from services.worker.dispatcher import Dispatcher, Limits


class Case:
    """A dispatcher, and the requests that it started, in order. Requests 0 to `admitted` - 1 arrive one by one."""

    def __init__(self, slots: int, places: int, admitted: int = 0, tokens: int | None = None) -> None:
        self.started: list[object] = []
        self.now_s = 0.0
        limits = Limits(slots=slots, places=places, tokens=tokens)
        self.dispatcher = Dispatcher(limits, self.started.append, lambda: self.now_s)
        for key in range(admitted):
            self.dispatcher.admit([key], tokens=1)

    @property
    def counts(self) -> tuple[int, int]:
        return self.dispatcher.running_count, self.dispatcher.waiting_count

    def refusal(self, *keys: object, tokens: int = 1) -> Failure | None:
        """The failure that refuses a group; None: the group is admitted."""
        try:
            self.dispatcher.admit(keys, tokens)
        except Failure as failure:
            return failure
        return None

    def is_refused(self, *keys: object, tokens: int = 1) -> bool:
        refusal = self.refusal(*keys, tokens=tokens)
        assert refusal is None or refusal.reason is Reason.WORKER_AT_CAPACITY
        return refusal is not None


class Model:
    """The obvious implementation of a dispatcher: a list of running requests and a queue of waiting ones."""

    def __init__(self, slots: int, places: int, tokens: int | None) -> None:
        self.slots, self.places, self.tokens = slots, places, tokens
        self.running: list[object] = []
        self.waiting: deque[tuple[object, int]] = deque()
        self.started: list[object] = []

    def admit(self, keys: list[object], tokens: int) -> Reason | None:
        """Admit a group as a whole, or change nothing."""
        would_wait = [*self.waiting, *((key, tokens) for key in keys)]
        for _ in range(self.slots - len(self.running)):
            would_wait = would_wait[1:]
        empty = Model(self.slots, self.places, self.tokens)
        if len(would_wait) <= self.places and (would_wait == [] or self._fits([own for _, own in would_wait])):
            self.waiting.extend((key, tokens) for key in keys)
            return None
        is_new = not self.running and not self.waiting
        return Reason.INVALID_ARGUMENT if is_new or empty.admit(keys, tokens) else Reason.WORKER_AT_CAPACITY

    def _fits(self, waiting_tokens: list[int]) -> bool:
        return self.tokens is None or sum(waiting_tokens) <= self.tokens

    def release(self, key: object) -> None:
        self.running = [one for one in self.running if one != key]
        self.waiting = deque(one for one in self.waiting if one[0] != key)

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.popleft()[0])
            self.started.append(self.running[-1])


ADMIT = st.tuples(st.just("admit"), st.integers(1, 11), st.integers(1, 4))
RELEASE = st.tuples(st.sampled_from(["release running", "release waiting"]), st.integers(0, 9), st.just(0))


@settings(max_examples=300)
@given(
    slots=st.integers(1, 5),
    places=st.integers(0, 5),
    tokens=st.none() | st.integers(0, 12),
    events=st.lists(ADMIT | RELEASE),
)
def test_dispatcher_agrees_with_the_obvious_model_for_any_order_of_events(
    slots: int, places: int, tokens: int | None, events: list[tuple[str, int, int]]
) -> None:
    """Single requests and groups, finishes and cancels: FIFO order, exact counts and verdicts, and no leak."""
    case, model = Case(slots, places, tokens=tokens), Model(slots, places, tokens)

    for number, (event, choice, prompt) in enumerate(events):
        running, waiting = model.running, [key for key, _ in model.waiting]
        if event == "admit":
            group: list[object] = [(number, one) for one in range(choice)]
            refusal = case.refusal(*group, tokens=prompt)
            assert (refusal and refusal.reason) == model.admit(group, prompt)
        elif pool := running if event == "release running" else waiting:
            case.dispatcher.release(pool[choice % len(pool)])
            model.release(pool[choice % len(pool)])
        model.fill()
        assert case.started == model.started
        assert case.counts == (len(model.running), len(model.waiting))
        assert case.counts[0] <= slots
        assert case.counts[1] <= places

    for key in [*(key for key, _ in model.waiting), *model.running]:
        case.dispatcher.release(key)
    assert case.counts == (0, 0)
    assert case.dispatcher.refusal(RefusedFor.CAPACITY, "").metadata.get("waiting_tokens", "0") == "0"


def table() -> dict[tuple[str, str], str]:
    """The table in the module's docstring: (event, state) → effect."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (module.__doc__ or "").splitlines()
        if line.startswith("|") and "---" not in line
    ]
    return {(row[0], state): cell for row in rows[1:] for state, cell in zip(rows[0][1:], row[1:], strict=True)}


ADMITTED = {"running < N": 1, "running = N, none waits": 2, "running = N, some wait": 3, "running = N, Q wait": 4}


def seen_at_admission(case: Case, count: int) -> str:
    """The effect of a group of `count` that arrives."""
    running, waiting = case.counts
    if case.is_refused(*(f"new {number}" for number in range(count))):
        assert case.counts == (running, waiting), "a refusal must not change the counts"
        return "refused"
    ran, waited = case.counts[0] - running, case.counts[1] - waiting
    assert ran + waited == count
    return "runs" if not waited else "runs, and the rest waits" if ran else "waits"


def seen_at_release_of_a_running_one(case: Case) -> str:
    running, waiting = case.counts
    case.dispatcher.release(0)
    if case.counts == (running - 1, 0):
        return "frees a slot"
    assert case.started[-1] == 2
    assert case.counts == (2, waiting - 1)
    return "the first waiting one runs"


def seen_at_release_of_a_waiting_one(case: Case, last: int) -> str:
    waiting = case.counts[1]
    if not waiting:
        return "–"
    case.dispatcher.release(last)
    assert case.counts == (2, waiting - 1)
    return "frees a place"


@pytest.mark.parametrize(("event", "state"), table())
def test_dispatcher_behaves_as_the_table_in_its_docstring(event: str, state: str) -> None:
    """N = Q = 2; requests 0 and 1 run, 2 and 3 wait. The group that does not fit is larger than the room by one."""
    admitted = ADMITTED[state]
    case, room = Case(2, 2, admitted), 4 - admitted
    seen = {
        "admit one": lambda: seen_at_admission(case, 1),
        "admit a group that fits": lambda: seen_at_admission(case, room) if room else "–",
        "admit a group that does not fit": lambda: seen_at_admission(case, room + 1),
        "release a running one": lambda: seen_at_release_of_a_running_one(case),
        "release a waiting one": lambda: seen_at_release_of_a_waiting_one(case, admitted - 1),
    }

    assert seen[event]() == table()[event, state]


@pytest.mark.parametrize("places", [0, 1, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_exactly_n_plus_q_of_fifty_simultaneous_requests_are_admitted(slots: int, places: int) -> None:
    case = Case(slots, places)

    refused = [key for key in range(50) if case.is_refused(key)]

    assert refused == list(range(slots + places, 50))
    assert case.counts == (slots, places)


def test_release_is_idempotent_and_ignores_unknown_keys() -> None:
    case = Case(1, 2, 3)

    case.dispatcher.release(0)
    case.dispatcher.release(0)
    case.dispatcher.release("unknown")

    assert case.started == [0, 1]
    assert case.counts == (1, 1)


def test_release_in_the_middle_of_the_queue_keeps_the_order() -> None:
    case = Case(1, 3, 4)

    case.dispatcher.release(2)
    assert not case.is_refused("new")
    for key in (0, 1, 3):
        case.dispatcher.release(key)

    assert case.started == [0, 1, 3, "new"]


def test_admitted_key_cannot_be_admitted_again() -> None:
    case = Case(1, 1, 2)

    for key in (0, 1):
        with pytest.raises(AssertionError):
            case.dispatcher.admit([key], 1)


@pytest.mark.parametrize(("slots", "places", "tokens"), [(0, 1, None), (1, -1, None), (1, 1, -1)])
def test_limits_without_a_slot_or_below_zero_are_refused(slots: int, places: int, tokens: int | None) -> None:
    with pytest.raises(AssertionError):
        Limits(slots=slots, places=places, tokens=tokens)


def test_service_time_is_a_weighted_mean_of_how_long_slots_were_held() -> None:
    case = Case(1, 2, 3)
    assert case.dispatcher.service_time_s is None

    case.dispatcher.release(2)
    assert case.dispatcher.service_time_s is None, "a request that only waited held no slot"
    case.now_s = 8.0
    case.dispatcher.release(0)
    assert case.dispatcher.service_time_s == 8.0
    case.now_s = 24.0
    case.dispatcher.release(1)

    assert case.dispatcher.service_time_s == 9.0, "one eighth of 16 and seven eighths of 8"


def test_unused_slot_does_not_count_towards_the_service_time() -> None:
    case = Case(1, 1, 2)
    case.now_s = 8.0
    case.dispatcher.release(0)

    case.dispatcher.release(1, was_used=False)

    assert case.dispatcher.service_time_s == 8.0
    assert case.dispatcher.running_count == 0


# Refusals


def test_refusal_has_the_limits_and_the_state() -> None:
    refusal = Case(2, 1, 3).refusal("new")

    assert refusal is not None
    assert dict(refusal.metadata) == {
        "cause": "capacity",
        "engine_request_limit": "2",
        "request_queue_limit": "1",
        "running": "2",
        "waiting": "1",
    }
    assert refusal.retry_after_s is None, "no service time is known yet"


def test_refusal_has_the_token_limit_if_there_is_one() -> None:
    case = Case(1, 9, 1, tokens=10)
    assert not case.is_refused("waits", tokens=6)

    refusal = case.refusal("new", tokens=5)

    assert refusal is not None
    assert refusal.detail.endswith("too many prompt tokens would wait (11 of at most 10)")
    assert refusal.metadata["cause"] == "queue_tokens"
    assert (refusal.metadata["queue_token_limit"], refusal.metadata["waiting_tokens"]) == ("10", "6")


def test_refusal_says_when_all_waiting_requests_and_one_more_will_have_had_a_slot() -> None:
    case = Case(2, 3, 6 - 1)
    case.now_s = 8.0
    case.dispatcher.release(0)
    assert not case.is_refused("waits")

    refusal = case.refusal("new")

    assert refusal is not None
    assert refusal.retry_after_s == (3 + 1) * 8.0 / 2


@pytest.mark.parametrize(("prompt", "is_refused"), [(4, False), (5, True)])
def test_request_that_would_exceed_the_waiting_tokens_is_refused(prompt: int, is_refused: bool) -> None:
    case = Case(1, 9, 1, tokens=10)
    assert not case.is_refused("waits", tokens=6)

    assert case.is_refused("new", tokens=prompt) is is_refused


def test_token_limit_does_not_apply_to_a_request_that_finds_a_free_slot() -> None:
    assert not Case(1, 9, tokens=0).is_refused("new", tokens=1000)


@pytest.mark.parametrize(("prompt", "is_refused"), [(5, False), (6, True)])
def test_group_is_refused_for_the_tokens_of_its_waiting_part_only(prompt: int, is_refused: bool) -> None:
    case = Case(2, 9, 1, tokens=10)

    assert case.is_refused("a", "b", "c", tokens=prompt) is is_refused


def test_tokens_of_requests_that_left_the_queue_do_not_count() -> None:
    case = Case(1, 9, 1, tokens=10)
    assert not case.is_refused("first", tokens=6)
    assert not case.is_refused("second", tokens=4)

    case.dispatcher.release(0)
    assert not case.is_refused("third", tokens=6), "the first request runs"
    case.dispatcher.release("second")

    assert not case.is_refused("fourth", tokens=4)


@pytest.mark.parametrize(("count", "tokens"), [(4, None), (3, 0)])
def test_group_that_can_never_fit_is_an_invalid_argument(count: int, tokens: int | None) -> None:
    """N = 2, Q = 1. A client that is told to retry would retry for ever."""
    refusal = Case(2, 1, tokens=tokens).refusal(*range(count))

    assert refusal is not None
    assert (refusal.reason, refusal.param) == (Reason.INVALID_ARGUMENT, "n")
    assert "2 run" in refusal.detail
