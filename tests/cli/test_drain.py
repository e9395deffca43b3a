"""`unbroken drain`: asks one registry after another, and explains why a worker cannot be drained.

That streams move when a worker drains is tested in tests/integration/moves/test_drain.py.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from services.cli.drain import command
from services.runtime.loop import run_on_loop
from tests.registry.support import WAIT_S, started_registry


def test_unknown_instance_is_an_error_that_says_where_to_find_ids(tmp_path: Path) -> None:
    async def scenario() -> subprocess.CompletedProcess[str]:
        async with started_registry(tmp_path, "--listen", "127.0.0.1:0") as registry:
            command = [sys.executable, "-m", "services", "drain", "nosuch", "--registry", await registry.address()]
            return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S)

    done = run_on_loop(scenario())

    assert done.returncode == 1
    assert "no instance 'nosuch' is registered. Workers' ids are in their logs" in done.stderr


def test_unreachable_registry_is_an_error_that_names_the_option() -> None:
    done = CliRunner().invoke(command, ["some-worker", "--registry", "127.0.0.1:1"])

    assert done.exit_code == 1
    assert "no registry answers: " in done.output
    assert "give its address with --registry" in done.output
