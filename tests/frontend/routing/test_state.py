"""State: the table in the docstring is the table in the code, and a candidate is in the first state that applies."""

import re
from collections.abc import Callable

import pytest

from services.frontend.routing import state as state_module
from services.frontend.routing.candidate import Candidate
from services.frontend.routing.state import (
    LEFT_OUT,
    MOVED_REQUEST,
    NEW_REQUEST,
    TREATMENTS,
    Needs,
    State,
)
from services.frontend.routing.thresholds import Thresholds
from services.worker.engine import RankLoad
from tests.support.doubles import fill, make_candidate, make_room, report

CHOICES = {None: "never", 1: "first choice", 2: "second choice", 3: "third choice"}
BUSY = RankLoad(kv_blocks_used=9, kv_blocks_total=10, active_prefill_tokens=0)
CALM = RankLoad(kv_blocks_used=0, kv_blocks_total=10, active_prefill_tokens=0)


def rows_of_docstring() -> list[list[str]]:
    rows = re.findall(r"^\| ([A-Z]+) \| (.+) \|$", state_module.__doc__ or "", re.MULTILINE)
    return [[name, *rest.split(" | ")] for name, rest in rows]


def test_the_table_in_the_docstring_is_the_table_in_the_code() -> None:
    in_code = [
        [state.name, CHOICES[one.new], CHOICES[one.moved], one.look_again.value] for state, one in TREATMENTS.items()
    ]

    assert [[name, *rest] for name, _, *rest in rows_of_docstring()] == in_code
    assert list(TREATMENTS) == list(State)


def test_the_orders_of_choice_follow_from_the_table() -> None:
    assert NEW_REQUEST == (State.HEALTHY, State.QUARANTINED)
    assert MOVED_REQUEST == (State.HEALTHY, State.QUARANTINED, State.BUSY)
    assert LEFT_OUT == (State.GONE, State.FULL)


def exclude(worker: Candidate) -> Needs:
    return Needs(frozenset({worker.key}), Thresholds(active_decode_blocks=0.5))


def everything_applies() -> Candidate:
    worker = make_candidate("a", ranks=[BUSY], quarantined_until=10.0, is_draining=True, is_full=True)
    assert worker.state(exclude(worker), 0.0) is State.GONE
    return worker


def test_a_worker_is_in_the_first_state_of_the_table_that_applies() -> None:
    """All conditions hold at first. Each step ends the condition of the current state."""
    worker = everything_applies()
    by_threshold = Needs(thresholds=Thresholds(active_decode_blocks=0.5))

    def stay() -> None:
        worker.is_draining = False

    steps: list[tuple[Callable[[], object], Needs, float]] = [
        (lambda: None, exclude(worker), 0.0),
        (stay, exclude(worker), 0.0),
        (lambda: make_room(worker), exclude(worker), 0.0),
        (lambda: None, by_threshold, 0.0),
        (lambda: report(worker, CALM), by_threshold, 0.0),
        (lambda: None, by_threshold, 10.0),
    ]
    states = []
    for end, needs, now in steps:
        end()
        states.append(worker.state(needs, now))

    assert [state.name for state in states] == [name for name, *_ in rows_of_docstring()]


@pytest.mark.parametrize("gone", [{"is_draining": True}, {"is_lost": True}], ids=str)
def test_a_worker_that_leaves_or_is_lost_is_gone_and_closed(gone: dict[str, bool]) -> None:
    worker = make_candidate("a", **gone)  # type: ignore[arg-type]

    assert (worker.state(Needs(), 0.0), worker.is_closed) == (State.GONE, True)


def test_a_worker_without_room_for_two_choices_is_full_for_two_and_not_closed() -> None:
    worker = make_candidate("a", slots=2, in_flight_count=1)

    assert [worker.state(Needs(count=count), 0.0) for count in (1, 2)] == [State.HEALTHY, State.FULL]
    assert not worker.is_closed
    fill(worker)
    assert worker.is_closed
