"""The configuration of llama.cpp: its threads sleep while they wait, unless the user's environment says otherwise."""

import os
import subprocess
import sys

import pytest

from tests.support.clock import WAIT_S

PRINT_POLICY = "import os, services.models.llama_cpp; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("given", "policy"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_wait_policy_is_passive_unless_set_in_the_environment(given: dict[str, str], policy: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}

    done = subprocess.run(
        [sys.executable, "-c", PRINT_POLICY],
        env=inherited | given,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=True,
    )

    assert done.stdout.strip() == policy
