"""Full garbage collections run while few clients are connected, or at the latest when much garbage may exist."""

import asyncio
import gc
import weakref

import pytest

from services.runtime import gc_control
from services.runtime.gc_control import CLIENTS_FEW, ROUNDS_MAX, ROUNDS_MIN, collect_when_quiet, is_due
from tests.support.doubles import run_async


@pytest.mark.parametrize(
    ("rounds", "clients", "due"),
    [
        (ROUNDS_MIN - 1, 0, False),
        (ROUNDS_MIN, 0, True),
        (ROUNDS_MIN, CLIENTS_FEW - 1, True),
        (ROUNDS_MIN, CLIENTS_FEW, False),
        (ROUNDS_MAX - 1, 5000, False),
        (ROUNDS_MAX, 5000, True),
    ],
)
def test_full_collection_is_due_early_with_few_clients_and_late_with_many(rounds: int, clients: int, due: bool) -> None:
    assert is_due(rounds, clients) is due


def test_each_younger_collection_visits_few_objects_whatever_python_has_set() -> None:
    """Bug: one of the middle generation visited 70,000 objects, and held up all streams for as long as a full one."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 1_000, 1_000)
    try:
        gc_control.take_over()
        young, middle, _ = gc.get_threshold()
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()

    assert young * middle <= 25_000
    assert gc_control.ROUNDS_MAX * young * middle >= 1_400_000, "full ones are no more frequent than the docs say"


class Cycle:
    """A reference cycle: garbage once it is unreachable."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_not_collected_while_many_clients_are_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc_control, "POLL_S", 0.001)
    thresholds = gc.get_threshold()

    async def scenario() -> None:
        clients = CLIENTS_FEW
        asked = asyncio.Semaphore(0)

        def client_count() -> int:
            asked.release()
            return clients

        cycle = Cycle()
        seen = weakref.ref(cycle)
        gc.collect()  # Moves the cycle to the oldest generation.
        del cycle
        for _ in range(ROUNDS_MIN):
            gc.collect(1)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(collect_when_quiet(client_count))
            for _ in range(3):
                await asked.acquire()
            assert seen() is not None
            clients = 0
            while seen() is not None:
                await asyncio.sleep(0.001)
            task.cancel()

    try:
        gc_control.take_over()
        run_async(scenario())
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
