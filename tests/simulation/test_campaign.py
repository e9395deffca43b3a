"""Campaigns of seeds, as `make simulate` runs them."""

import os
import re
import subprocess
import sys

import pytest

SEEDS = 200
SEEDS_OF_A_TEST_S_MAX = 600


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
    assert re.fullmatch(r"(?:[0-9]+ [0-9a-f]{8}\n){20}", runs["0"])


@pytest.mark.parametrize(("number", "first"), [(8, 9), (10, 0)])
def test_planted_fault_is_found(number: int, first: int) -> None:
    """`first`: a seed that finds it, by `python -m simulation planted`."""
    done = simulate("planted", str(number), f"--first={first}", "--seeds=5")

    assert done.returncode == 0, done.stdout + done.stderr
    assert "found by seed" in done.stdout


def test_failing_seed_is_shown_with_its_shortened_plan_and_its_trace() -> None:
    done = simulate("seed", "1")

    assert done.returncode == 0
    assert done.stdout.startswith("Plan(seed=1, ")
    assert "frontend-0   starts" in done.stdout
    assert re.search(r"fingerprint [0-9a-f]{8}, [0-9]+ turns", done.stdout)
