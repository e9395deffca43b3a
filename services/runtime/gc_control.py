"""Runs full garbage collections when they delay the fewest clients.

A full collection visits every object, and no stream moves meanwhile: about 15 ms with few clients, 100 ms with 5,000.
By default Python runs one when the number of objects has grown by a quarter, which is in the middle of a storm of
requests. Here it runs while few clients are connected, or at the latest when so much garbage may exist that memory
matters more than a pause. Python still collects the younger generations, whose collections are short, but rarely: most
objects of a request live as long as the request and need not be visited every few requests.
"""

import asyncio
import gc
from collections.abc import Callable, Sized
from weakref import WeakSet

CLIENTS_FEW = 256
YOUNG_MAX = 7_000
"""Number of new objects that triggers a young collection. With Python's default of 700, collections take 4 % of the
cost of a request."""
ROUNDS_MIN = 1
"""Collections of the middle generation (one per 10 young ones) that make a full collection worthwhile."""
ROUNDS_MAX = 20
"""The same, with many clients: up to 1.4 million objects of garbage, or four storms of 5,000 clients."""
POLL_S = 0.25
_NEVER = 2**31 - 1
_client_sets: WeakSet[Sized] = WeakSet()


def register_clients(clients: Sized) -> None:
    """Postpone full collections while many `clients` are connected. Counts all sets of clients that still exist."""
    _client_sets.add(clients)


def client_count() -> int:
    """The number of connected clients of this process."""
    return sum(map(len, _client_sets))


def is_due(rounds: int, clients: int) -> bool:
    """Whether to run a full collection. rounds: collections of the middle generation since the last full one."""
    return rounds >= (ROUNDS_MIN if clients < CLIENTS_FEW else ROUNDS_MAX)


def take_over() -> None:
    """Disable Python's own full collections; `collect_when_quiet` must run them. Imported modules are never visited."""
    gc.freeze()
    _, middle, _ = gc.get_threshold()
    gc.set_threshold(YOUNG_MAX, middle, _NEVER)


async def collect_when_quiet(client_count: Callable[[], int] = client_count) -> None:
    """Run full collections when they are due, until cancelled."""
    while True:
        await asyncio.sleep(POLL_S)
        if is_due(gc.get_count()[2], client_count()):
            gc.collect()
