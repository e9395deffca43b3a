"""Runs campaigns of seeds, and single seeds.

python -m simulation campaign --seeds 10000
python -m simulation seed 4711
"""

import resource
import sys
import time
from collections import Counter

import click

from simulation.planted import PLANTS, plant
from simulation.scenario.drawing import draw_plan

SHOWN_CHARACTERS = 240
SITUATIONS_FROM_SEEDS = 5_000
"""A campaign of so many seeds must reach every situation."""


@click.group()
def main() -> None:
    """Run whole planes with virtual time and faults that a seed chooses."""


@main.command()
@click.option("--seeds", default=200, show_default=True, help="How many seeds to run.")
@click.option("--first", default=0, show_default=True, help="The first of them.")
@click.option("--jobs", default=2, show_default=True, help="How many run at a time.")
def campaign(seeds: int, first: int, jobs: int) -> None:
    """Run many seeds, and print which failed and what was reached."""
    from simulation.campaign import Outcome, run_seeds
    from simulation.scenario.situations import SITUATIONS

    began, failed, counts, turns = time.perf_counter(), list[Outcome](), Counter[str](), 0
    for outcome in run_seeds(range(first, first + seeds), jobs):
        counts.update(outcome.reached)
        turns += outcome.turns
        if outcome.problems:
            failed.append(outcome)
            print(f"seed {outcome.seed}: {outcome.problems[0][:SHOWN_CHARACTERS]}", flush=True)
    print("\n| situation | seeds that reached it |\n| --- | --- |")
    for situation in SITUATIONS:
        print(f"| {situation.name} | {counts[situation.name]} |")
    elapsed_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = (used.ru_utime + used.ru_stime) / max(seeds, 1)
    print(f"\n{seeds} seeds, {turns} turns of event loops, {elapsed_s:.0f} s, {cpu_s:.3f} CPU seconds per seed")
    print(f"{len(failed)} failed")
    missed = [one.name for one in SITUATIONS if not counts[one.name]]
    if missed and seeds >= SITUATIONS_FROM_SEEDS:
        sys.exit(f"never reached: {', '.join(missed)}")
    if failed:
        sys.exit(f"see one with: python -m simulation seed {failed[0].seed}")


@main.command()
@click.argument("number", type=int)
@click.option("--whole", is_flag=True, help="Do not shorten the plan of a seed that fails.")
def seed(number: int, whole: bool) -> None:
    """Run one seed, shortened if it fails, and print its trace."""
    from simulation.campaign import problems_of, run_in_child, shortened

    plan = draw_plan(number)
    if not whole and problems_of(run_in_child(plan)):
        plan = shortened(plan)
    result = run_in_child(plan, with_trace=True)
    print(plan)
    if not isinstance(result, str):
        print(*(line[:SHOWN_CHARACTERS] for line in result.trace), sep="\n")
        print(f"fingerprint {result.fingerprint:08x}, {result.turns} turns")
    print(*problems_of(result), sep="\n")
    sys.exit(bool(problems_of(result)))


@main.command()
@click.argument("number", type=click.IntRange(0, len(PLANTS) - 1))
@click.option("--seeds", default=10_000, show_default=True, help="How many seeds to run at most.")
@click.option("--first", default=0, show_default=True, help="The first of them.")
def planted(number: int, seeds: int, first: int) -> None:
    """Plant one of the known faults, and say how many seeds it takes to find it."""
    print(plant(number).name, flush=True)
    from simulation.campaign import run_one_by_one

    for number, outcome in enumerate(run_one_by_one(range(first, first + seeds)), start=1):
        if outcome.problems:
            print(f"found by seed {outcome.seed}, number {number}: {outcome.problems[0][:SHOWN_CHARACTERS]}")
            return
    sys.exit(f"not found by {seeds} seeds")


@main.command()
@click.argument("numbers", type=int, nargs=-1)
@click.option("--together", is_flag=True, help="Run them in one process, not each in its own.")
def fingerprints(numbers: tuple[int, ...], together: bool) -> None:
    """Print a hash of all that happens in the runs of these seeds."""
    from simulation.campaign import run_in_child, run_together

    results = run_together(numbers) if together else [run_in_child(draw_plan(one)) for one in numbers]
    for one, result in zip(numbers, results, strict=True):
        print(one, result if isinstance(result, str) else f"{result.fingerprint:08x}")
