"""The state of a worker for one call, and how routing treats a worker in it.

This is the only state machine of a worker. `Candidate.state` returns the first state of the table that applies.

| state | the worker | a new request | a request that lost its worker | is looked at again |
| --- | --- | --- | --- | --- |
| GONE | is lost, or leaves | never | never | after a change |
| FULL | has no room for as many choices or prompt tokens | never | never | after a change |
| EXCLUDED | has room, but the call must not go there again | never | never | by the next request |
| BUSY | has room, and each known rank is over a threshold | never | third choice | after a while |
| QUARANTINED | has room, and failed a moment ago | second choice | second choice | by the next request |
| HEALTHY | has room | first choice | first choice | by the next request |

After a change: the worker set leaves out a worker that is gone, or full for every request, until its candidate reports
that it may have room again. After a while: of more than `LOOKS_MAX` workers those that are busy are left out for
`BUSY_S`. The session's events cause the changes: `candidate.py` lists them, `capacity.py` says when a worker is full.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from msgspec import Struct

from services.core.tenant import EVERYBODY, Tenant
from services.frontend.routing.thresholds import Thresholds


class State(Enum):
    """The names of the states. `TREATMENTS` has their meaning."""

    GONE = "GONE"
    FULL = "FULL"
    EXCLUDED = "EXCLUDED"
    BUSY = "BUSY"
    QUARANTINED = "QUARANTINED"
    HEALTHY = "HEALTHY"


class LookAgain(Enum):
    """When routing looks again at a worker that it found in some state."""

    BY_THE_NEXT_REQUEST = "by the next request"
    AFTER_A_WHILE = "after a while"
    AFTER_A_CHANGE = "after a change"


class Treatment(NamedTuple):
    """How routing treats a worker in some state.

    `new`, `moved`: which choice it is for a new request, and for one that lost its worker: 1 is the first; None: never.
    """

    new: int | None
    moved: int | None
    look_again: LookAgain


TREATMENTS = {
    State.GONE: Treatment(None, None, LookAgain.AFTER_A_CHANGE),
    State.FULL: Treatment(None, None, LookAgain.AFTER_A_CHANGE),
    State.EXCLUDED: Treatment(None, None, LookAgain.BY_THE_NEXT_REQUEST),
    State.BUSY: Treatment(None, 3, LookAgain.AFTER_A_WHILE),
    State.QUARANTINED: Treatment(2, 2, LookAgain.BY_THE_NEXT_REQUEST),
    State.HEALTHY: Treatment(1, 1, LookAgain.BY_THE_NEXT_REQUEST),
}


def _in_order(choice_of: Callable[[Treatment], int | None]) -> tuple[State, ...]:
    choices = {state: choice for state, one in TREATMENTS.items() if (choice := choice_of(one)) is not None}
    return tuple(sorted(choices, key=lambda state: choices[state]))


NEW_REQUEST = _in_order(lambda treatment: treatment.new)
"""The states of workers that take a new request, the first choice first."""
MOVED_REQUEST = _in_order(lambda treatment: treatment.moved)
"""The same for a request that lost its worker."""
LEFT_OUT = tuple(state for state, one in TREATMENTS.items() if one.look_again is LookAgain.AFTER_A_CHANGE)
"""The states in which a worker set leaves out a worker until it changes, if it is closed to every request."""


class Needs(Struct, frozen=True, gc=False):
    """What a call needs of a worker.

    `excluded`: keys of candidates that it must not go to. `thresholds`: None if no worker counts as busy. `count`: how
    many choices there must be room for at once. `tokens`: the prompt tokens of all of them; 0 ignores refusals for
    tokens, because the worker itself decides whether so many may wait. `tenant`: whose call it is.
    """

    excluded: frozenset[str] = frozenset()
    thresholds: Thresholds | None = None
    count: int = 1
    tokens: int = 0
    tenant: Tenant = EVERYBODY
