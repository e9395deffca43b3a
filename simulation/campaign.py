"""Runs many seeds, in processes that are forked from one in which everything is imported.

A forked process costs by itself a third of what a seed costs, so each runs several seeds. A seed that fails there is
run again in a process of its own, so that the seeds before it have no part in what is reported.
"""

import gc
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NoReturn

from simulation.run import Report, run_plan
from simulation.scenario.drawing import draw_plan
from simulation.scenario.plan import Plan

SEEDS_TOGETHER = 25
_SIZE = struct.Struct(">I")


def in_child(work: Callable[[], Any]) -> Any:
    """Do the work in a forked process, and return what it returns, or the text of its exception."""
    reader, writer = os.pipe()
    gc.freeze()  # Or a collection in the child writes to all memory that it shares, which copies it.
    pid = os.fork()
    if not pid:
        gc.disable()  # A run needs little memory, and collects what it leaves at its end.
        try:
            os.close(reader)
            try:
                result = work()
            except BaseException as error:
                result = _text_of(error)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(result, pipe)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return pickle.loads(data) if data else "the run died"


def run_in_child(plan: Plan, *, with_trace: bool = False) -> Report | str:
    """Run a plan in a process of its own. Returns the text of an exception that ended it."""

    def work() -> Report:
        report = run_plan(plan)
        return report if with_trace else replace(report, trace=())

    return in_child(work)  # type: ignore[no-any-return]


def run_together(seeds: Sequence[int]) -> list[Report | str]:
    """Run seeds one after the other in one process; if it dies of one of them, each in a process of its own."""
    results = in_child(lambda: [_attempt(draw_plan(seed)) for seed in seeds])
    return [run_in_child(draw_plan(seed)) for seed in seeds] if isinstance(results, str) else results


def _attempt(plan: Plan) -> Report | str:
    try:
        return replace(run_plan(plan), trace=())
    except Exception as error:
        return _text_of(error)
    finally:
        gc.freeze()  # The `finally` blocks of processes that were killed must not run in the next world.


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def problems_of(result: Report | str) -> tuple[str, ...]:
    return (result,) if isinstance(result, str) else result.problems


def shortened(plan: Plan) -> Plan:
    """The plan with as few requests and faults as still fail."""
    is_shorter = True
    while is_shorter:
        is_shorter = False
        candidates = [plan.without(fault=index) for index in range(len(plan.faults))]
        candidates += [plan.without(request=index) for index in range(len(plan.requests))]
        for candidate in candidates:
            if candidate.requests and problems_of(run_in_child(candidate)):
                plan, is_shorter = candidate, True
                break
    return plan


@dataclass(frozen=True)
class Outcome:
    """What came of one seed."""

    seed: int
    problems: tuple[str, ...]
    turns: int = 0
    reached: frozenset[str] = frozenset()


def run_seeds(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Run seeds in `jobs` processes at a time."""
    with ExitStack() as stack, DefaultSelector() as selector:
        for job in range(jobs):
            reader, writer = os.pipe()
            if not os.fork():
                os.close(reader)
                _work(seeds[job::jobs], writer)
            os.close(writer)
            selector.register(stack.enter_context(os.fdopen(reader, "rb")), EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                pipe: Any = key.fileobj
                if head := pipe.read(_SIZE.size):
                    yield pickle.loads(pipe.read(*_SIZE.unpack(head)))
                else:
                    selector.unregister(pipe)
    for _ in range(jobs):
        os.wait()


def _work(seeds: Sequence[int], writer: int) -> NoReturn:
    """Run the seeds of one job, and report each."""
    with os.fdopen(writer, "wb") as pipe:
        for outcome in run_one_by_one(seeds):
            item = pickle.dumps(outcome)
            pipe.write(_SIZE.pack(len(item)) + item)
            pipe.flush()
    os._exit(0)


def run_one_by_one(seeds: Sequence[int]) -> Iterator[Outcome]:
    """Run seeds in their order: some at a time together, and those that fail alone."""
    for start in range(0, len(seeds), SEEDS_TOGETHER):
        some = seeds[start : start + SEEDS_TOGETHER]
        yield from map(_outcome, some, run_together(some))


def _outcome(seed: int, together: Report | str) -> Outcome:
    """What came of a seed. `together`: what came of it with others in its process."""
    result = run_in_child(draw_plan(seed)) if problems_of(together) else together
    if isinstance(result, str):
        return Outcome(seed, (result,))
    problems = result.problems or tuple(f"{one} (only after other seeds)" for one in problems_of(together))
    return Outcome(seed, problems, result.turns, result.reached)
