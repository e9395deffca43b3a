"""`python -m bench.prompts` measures each way for each splitter. Tests run one round, and judge no time."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.model
def test_each_way_is_measured_for_each_splitter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.prompts", "--rounds=1"], cwd=ROOT, capture_output=True, text=True, check=True
    )

    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in done.stdout.splitlines()[1:]]
    ways = ["inside", "in a thread", "in a helper"]
    assert rows == [[splitter, way] for splitter in ("smollm", "tekken") for way in ways]
