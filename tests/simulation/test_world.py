"""Virtual time, the order of callbacks, and what the world notices."""

import asyncio
from functools import partial

from tests.simulation.support import world


def test_hours_pass_at_once() -> None:
    made, times = world(), list[float]()

    async def wait() -> None:
        for _ in range(3):
            await asyncio.sleep(3600)
            times.append(asyncio.get_running_loop().time())

    made.spawn("waiter", wait)
    made.run(4 * 3600.0)

    assert times == [3600.0, 7200.0, 10800.0]


def test_callbacks_of_a_process_run_in_their_order() -> None:
    made, seen = world(), list[int]()

    async def call() -> None:
        loop = asyncio.get_running_loop()
        for number in range(100):
            loop.call_soon(seen.append, number)
        await asyncio.sleep(1)

    made.spawn("caller", call)
    made.run(0.5)

    assert seen == list(range(100))


def test_order_of_processes_is_that_of_the_seed() -> None:
    def order(seed: str) -> list[str]:
        made, seen = world(seed), list[str]()

        async def note(name: str) -> None:
            for _ in range(10):
                seen.append(name)
                await asyncio.sleep(0)

        for name in ("a", "b", "c"):
            made.spawn(name, partial(note, name))
        made.run(1.0)
        return seen

    assert order("1") == order("1")
    assert len({tuple(order(str(seed))) for seed in range(10)}) > 1


def test_exception_that_nobody_handles_is_a_problem() -> None:
    made = world()

    async def fail() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    made.spawn("broken", fail)
    made.run(0.5)

    assert len(made.problems) == 1
    assert "division by zero" in made.problems[0]


def test_exception_that_nobody_retrieves_is_a_problem() -> None:
    made = world()

    async def leave() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(ValueError("left alone"))
        circle: list[object] = [future]
        circle.append(circle)  # So it is not freed before a collection.

    made.spawn("careless", leave)
    made.run(0.5)
    made.collect()

    assert len(made.problems) == 1
    assert "left alone" in made.problems[0]


def test_killed_process_runs_no_further_callback() -> None:
    made, seen = world(), list[int]()

    async def count() -> None:
        while True:
            seen.append(len(seen))
            await asyncio.sleep(1)

    process = made.spawn("counter", count)
    made.run(2.5)
    made.kill(process)
    made.run(10.0)

    assert seen == [0, 1, 2]


def test_job_of_an_executor_runs_later_and_returns_its_result() -> None:
    made, results = world(), list[object]()

    async def work() -> None:
        running = asyncio.get_running_loop().run_in_executor(None, sum, [1, 2, 3])
        results.append(running.done())
        results.append(await running)

    made.spawn("worker", work)
    made.run(1.0)

    assert results == [False, 6]
