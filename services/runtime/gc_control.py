"""Collects cyclic garbage when that holds up the fewest.

A full collection looks at every object there is, and for so long no stream moves: some 15 ms with few clients, 100 ms
with 5,000. Left to itself Python makes one when the number of objects has grown by a quarter, which is in the midst of
a storm. Here one is made while few clients are connected, or at last when there may be so much garbage that memory
matters more than a pause. The younger generations, whose collections are short, are left to Python, but seldom: most of
what a request makes lives as long as it does, and need not be looked at every few requests.
"""

import asyncio
import gc
from collections.abc import Callable, Sized
from weakref import WeakSet

CLIENTS_FEW = 256
YOUNG_MAX = 7_000
"""New objects before Python looks at them. Left alone it does at 700, which is 4 % of what a request costs."""
ROUNDS_MIN = 1
"""Collections of the middle generation, one for 10 of the young, that make a full one worthwhile."""
ROUNDS_MAX = 20
"""Of those at most: 1.4 million objects that may be garbage, four storms of 5,000 clients."""
LOOK_S = 0.25
_NEVER = 2**31 - 1
_crowds: WeakSet[Sized] = WeakSet()


def spare(clients: Sized) -> None:
    """Make no full collection while these are many: it would hold them up. Of a process, as collections are."""
    _crowds.add(clients)


def client_count() -> int:
    """How many are to be spared."""
    return sum(map(len, _crowds))


def is_due(rounds: int, clients: int) -> bool:
    """Whether to collect all now. rounds: of the middle generation since the last time."""
    return rounds >= (ROUNDS_MIN if clients < CLIENTS_FEW else ROUNDS_MAX)


def take_over() -> None:
    """From now on `collect_when_quiet` has to make the full collections of this process. What was imported stays."""
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG_MAX, middle, _NEVER)


async def collect_when_quiet(client_count: Callable[[], int] = client_count) -> None:
    """Until cancelled."""
    while True:
        await asyncio.sleep(LOOK_S)
        if is_due(gc.get_count()[2], client_count()):
            gc.collect()
