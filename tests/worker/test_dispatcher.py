"""Dispatcher: exactly N run and exactly Q wait, in the order they came, whatever comes and goes."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.errors import Failure, Reason
from services.worker import dispatcher as module
from services.worker.dispatcher import Dispatcher, Limits


class Case:
    """A dispatcher, and what it started, in order."""

    def __init__(self, slots: int, places: int, admitted: int = 0) -> None:
        self.started: list[object] = []
        self.now_s = 0.0
        self.dispatcher = Dispatcher(Limits(slots=slots, places=places), self.started.append, lambda: self.now_s)
        for key in range(admitted):
            self.dispatcher.admit(key)

    @property
    def counts(self) -> tuple[int, int]:
        return self.dispatcher.running_count, self.dispatcher.waiting_count

    def is_refused(self, key: object) -> bool:
        try:
            self.dispatcher.admit(key)
        except Failure as failure:
            return failure.reason is Reason.WORKER_AT_CAPACITY
        return False


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(1, 5),
    places=st.integers(0, 5),
    events=st.lists(st.tuples(st.sampled_from(["admit", "release running", "release waiting"]), st.integers(0, 9))),
)
def test_any_order_of_events_agrees_with_the_obvious_model(
    slots: int, places: int, events: list[tuple[str, int]]
) -> None:
    """The model: a list of those that run, a queue of those that wait. FIFO, exact counts, and no leak at the end."""
    case = Case(slots, places)
    running: list[int] = []
    waiting: deque[int] = deque()
    started: list[int] = []

    for key, (event, choice) in enumerate(events):
        if event == "admit":
            fits = len(running) + len(waiting) < slots + places
            assert case.is_refused(key) is not fits
            if fits:
                waiting.append(key)
        elif pool := running if event == "release running" else waiting:
            gone = pool[choice % len(pool)]
            pool.remove(gone)
            case.dispatcher.release(gone)
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
            started.append(running[-1])
        assert case.started == started
        assert case.counts == (len(running), len(waiting))

    for key in [*waiting, *running]:
        case.dispatcher.release(key)
    assert case.counts == (0, 0)


def table() -> dict[tuple[str, str], str]:
    """(event, state) → effect, as the module's docstring has it."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (module.__doc__ or "").splitlines()
        if line.startswith("|") and "---" not in line
    ]
    return {(row[0], state): cell for row in rows[1:] for state, cell in zip(rows[0][1:], row[1:], strict=True)}


ADMITTED = {"running < N": 1, "running = N, none waits": 2, "running = N, some wait": 3, "running = N, Q wait": 4}


@pytest.mark.parametrize(("event", "state"), table())
def test_behaves_as_its_table_says(event: str, state: str) -> None:
    """N = Q = 2; requests 0 and 1 run, 2 and 3 wait."""
    admitted = ADMITTED[state]
    case = Case(2, 2, admitted)
    running, waiting = case.counts
    if event == "admit":
        seen = "refused" if case.is_refused("new") else "runs" if "new" in case.started else "waits"
    elif event == "release of a running one":
        case.dispatcher.release(0)
        seen = "frees a slot" if case.counts == (running - 1, 0) else "the first that waits runs"
        assert seen == "frees a slot" or (case.started[-1] == 2 and case.counts == (2, waiting - 1))
    elif not waiting:
        seen = "–"
    else:
        case.dispatcher.release(admitted - 1)
        seen = "frees a place" if case.counts == (2, waiting - 1) else "?"

    assert seen == table()[event, state]


@pytest.mark.parametrize("places", [0, 1, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_of_fifty_at_once_exactly_n_plus_q_are_taken(slots: int, places: int) -> None:
    case = Case(slots, places)

    refused = [key for key in range(50) if case.is_refused(key)]

    assert refused == list(range(slots + places, 50))
    assert case.counts == (slots, places)


def test_release_is_idempotent_and_knows_no_strangers() -> None:
    case = Case(1, 2, 3)

    case.dispatcher.release(0)
    case.dispatcher.release(0)
    case.dispatcher.release("stranger")

    assert case.started == [0, 1]
    assert case.counts == (1, 1)


def test_whoever_waits_in_the_middle_leaves_at_once_and_the_order_stays() -> None:
    case = Case(1, 3, 4)

    case.dispatcher.release(2)
    assert not case.is_refused("new")
    for key in (0, 1, 3):
        case.dispatcher.release(key)

    assert case.started == [0, 1, 3, "new"]


def test_a_key_that_is_in_cannot_come_in_again() -> None:
    case = Case(1, 1, 2)

    for key in (0, 1):
        with pytest.raises(AssertionError):
            case.dispatcher.admit(key)


@pytest.mark.parametrize(("slots", "places"), [(0, 1), (1, -1)])
def test_limits_under_which_somebody_would_wait_for_ever_are_refused(slots: int, places: int) -> None:
    with pytest.raises(AssertionError):
        Limits(slots=slots, places=places)


def test_the_service_time_is_a_mean_of_how_long_slots_were_held_in_which_newer_ones_weigh_more() -> None:
    case = Case(1, 2, 3)
    assert case.dispatcher.service_time_s is None

    case.dispatcher.release(2)
    assert case.dispatcher.service_time_s is None, "who only waited held no slot"
    case.now_s = 8.0
    case.dispatcher.release(0)
    assert case.dispatcher.service_time_s == 8.0
    case.now_s = 24.0
    case.dispatcher.release(1)

    assert case.dispatcher.service_time_s == 9.0, "an eighth of 16 and seven of 8"
