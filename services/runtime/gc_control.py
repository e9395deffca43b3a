"""Runs full garbage collections when they delay the fewest clients.

A full collection visits every object, and no stream moves meanwhile: about 15 ms with few clients, 100 ms with 5,000.
By default Python runs one when the number of objects has grown by a quarter, which is in the middle of a storm of
requests. Here it runs while there are few clients, or at the latest when so much garbage may exist that memory matters
more than a pause. A stream of HTTP/2 counts as a client: one connection may have a thousand. Python still collects the
younger generations, whose collections are short, but rarely: most objects of a request live as long as the request and
need not be visited every few requests.
"""

import asyncio
import gc
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

CLIENTS_FEW = 256
YOUNG_MAX = 7_000
"""Number of new objects that triggers a young collection. With Python's default of 700, collections take 4 % of the
cost of a request."""
MIDDLE_MAX = 3
"""Young collections that trigger one of the middle generation, which visits what is left of their objects, some 30,000
at most. With Python's default of 10 it is a pause as long as a full collection, in the middle of a storm."""
ROUNDS_MIN = 3
"""Collections of the middle generation that make a full collection worthwhile."""
ROUNDS_MAX = 67
"""The same, with many clients: up to 1.4 million objects of garbage, or four storms of 5,000 clients."""
POLL_S = 0.25
_NEVER = 2**31 - 1


class Crowd(Protocol):
    """Clients of this process. `held_count`: connections, and streams on them."""

    @property
    def held_count(self) -> int: ...


_crowds: WeakSet[Crowd] = WeakSet()


def register_clients(crowd: Crowd) -> None:
    """Postpone full collections while there are many clients. Counts all crowds that still exist."""
    _crowds.add(crowd)


def client_count() -> int:
    """The number of clients of this process."""
    return sum([crowd.held_count for crowd in _crowds])


def is_due(rounds: int, clients: int) -> bool:
    """Whether to run a full collection. rounds: collections of the middle generation since the last full one."""
    return rounds >= (ROUNDS_MIN if clients < CLIENTS_FEW else ROUNDS_MAX)


def take_over() -> None:
    """Disable Python's own full collections; `collect_when_quiet` must run them. Imported modules are never visited."""
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, MIDDLE_MAX, _NEVER)


async def collect_when_quiet(client_count: Callable[[], int] = client_count) -> None:
    """Run full collections when they are due, until cancelled."""
    while True:
        await asyncio.sleep(POLL_S)
        if is_due(gc.get_count()[2], client_count()):
            gc.collect()
