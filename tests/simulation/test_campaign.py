"""Campaigns of seeds, as `make simulate` runs them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from simulation import campaign
from simulation.campaign import Outcome
from simulation.run import Report
from simulation.scenario.plan import Plan

SEEDS = 200
FINGERPRINTS = r"(?:[0-9]+ [0-9a-f]{8}\n){20}"
SEEDS_OF_A_TEST_S_MAX = 600
FAULTS_FOUND = {
    624: "an answer whose grace ended between its being found and its adoption was unknown, not expired",
    6731: "the same of an answer that had no other client",
    3830: "a worker that was lost while its model was learned was logged as one that cannot be used",
}
"""Seeds that have found faults of the product. Each has a test of its own beside the code, as plans of seeds change."""


def simulate(*words: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run `python -m simulation`."""
    return subprocess.run(
        [sys.executable, "-m", "simulation", *words],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=SEEDS_OF_A_TEST_S_MAX,
    )


def test_no_seed_fails() -> None:
    done = simulate("campaign", f"--seeds={SEEDS}")

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SEEDS} seeds" in done.stdout
    reached = re.findall(r"^\| a .* \| ([0-9]+) \|$", done.stdout, re.MULTILINE)
    assert sum(map(int, reached)) > SEEDS, "next to nothing happened"


def test_same_seed_is_the_same_run_in_every_process() -> None:
    seeds = [str(seed) for seed in range(40, 60)]

    runs = {hash_seed: simulate("fingerprints", *seeds, hash_seed=hash_seed).stdout for hash_seed in ("0", "1", "4711")}

    assert len(set(runs.values())) == 1
    assert re.fullmatch(FINGERPRINTS, runs["0"])


def test_seed_is_the_same_run_after_others_in_its_process() -> None:
    """So a campaign may run several seeds in one process."""
    seeds = [str(seed) for seed in range(240, 260)]

    alone, together = (simulate("fingerprints", *words, *seeds).stdout for words in ([], ["--together"]))

    assert together == alone
    assert re.fullmatch(FINGERPRINTS, alone)


def campaign_of(monkeypatch: pytest.MonkeyPatch, run: Callable[[int, bool], tuple[str, ...]]) -> list[Outcome]:
    """A campaign of three seeds. `run`: called with each seed, and with whether it is the first of its process."""
    seeds_of_process: list[int] = []

    def run_plan(plan: Plan) -> Report:
        seeds_of_process.append(plan.seed)
        problems = run(plan.seed, len(seeds_of_process) == 1)
        return Report(problems, trace=(), fingerprint=0, turns=1, reached=frozenset())

    monkeypatch.setattr(campaign, "run_plan", run_plan)
    return list(campaign.run_seeds(range(3), jobs=1))


def test_seed_that_ends_its_process_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, is_first: bool) -> tuple[str, ...]:
        if seed == 1:
            os._exit(1)
        return ()

    assert [one.problems for one in campaign_of(monkeypatch, run)] == [(), ("the run died",), ()]


def test_failure_that_does_not_come_in_a_process_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, is_first: bool) -> tuple[str, ...]:
        return () if is_first else ("lost",)

    assert [one.problems for one in campaign_of(monkeypatch, run)] == [(), *[("lost (only after other seeds)",)] * 2]


def test_failure_is_that_of_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(seed: int, is_first: bool) -> tuple[str, ...]:
        return ("alone",) if is_first else ("after others",)

    assert [one.problems for one in campaign_of(monkeypatch, run)] == [("alone",)] * 3


@pytest.mark.parametrize(
    ("number", "first"),
    [
        (3, 54),
        (8, 9),
        (9, 16),
        (10, 2),
        (17, 5),
        (20, 3),
        (23, 55),
        (24, 3),
        (25, 12),
        (26, 910),
        (28, 22),
    ],
)
def test_planted_fault_is_found(number: int, first: int) -> None:
    """`first`: a seed that finds it, by `python -m simulation planted`."""
    done = simulate("planted", str(number), f"--first={first}", "--seeds=5")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "found by seed" in done.stdout


@pytest.mark.parametrize("seed", FAULTS_FOUND, ids=FAULTS_FOUND.get)
def test_seed_that_found_a_fault_of_the_product_does_not_fail_any_more(seed: int) -> None:
    done = simulate("campaign", f"--first={seed}", "--seeds=1")

    assert done.returncode == 0, done.stdout + done.stderr


def test_failing_seed_is_shown_with_its_shortened_plan_and_its_trace() -> None:
    done = simulate("seed", "1")

    assert done.returncode == 0
    assert done.stdout.startswith("Plan(seed=1, ")
    assert "frontend-0   starts" in done.stdout
    assert re.search(r"fingerprint [0-9a-f]{8}, [0-9]+ turns", done.stdout)
