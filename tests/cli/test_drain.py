"""`unbroken drain`: asks one registry after another, and says what happens to the worker, or why it cannot be drained.

That streams move when a worker drains is tested in tests/integration/moves/test_drain.py.
"""

import asyncio
import subprocess
import sys

import pytest
from click.testing import CliRunner

from services.cli.drain import command
from services.registry.memory_store import MemoryStore
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import INSTANCE_STATE_DRAINING
from tests.registry.support import put, running, served
from tests.support.clock import WAIT_S

UNREACHABLE = "127.0.0.1:1"


async def drain(instance_id: str, *registries: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services", "drain", instance_id, "--registry", ",".join(registries)]
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S)


@pytest.mark.parametrize("is_first", [True, False])
def test_drained_worker_is_named_whichever_registry_answers(is_first: bool) -> None:
    async def scenario() -> subprocess.CompletedProcess[str]:
        async with running(store := MemoryStore()), served(store) as address:
            await put(store, "w1")
            done = await drain("w1", *([address, UNREACHABLE] if is_first else [UNREACHABLE, address]))
            assert store.cache.entries["w1"].instance.state == INSTANCE_STATE_DRAINING
            return done

    done = run_on_loop(scenario())

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("w1 at 127.0.0.1:9000 was asked to drain; ")


def test_unknown_instance_is_an_error_that_says_where_to_find_ids() -> None:
    """All registries have the same records, so the next one is not asked."""

    async def scenario() -> subprocess.CompletedProcess[str]:
        async with running(store := MemoryStore()), served(store) as address:
            return await drain("nosuch", address, UNREACHABLE)

    done = run_on_loop(scenario())

    assert done.returncode == 1
    assert "no instance 'nosuch' is registered. Workers' ids are in their logs" in done.stderr


def test_unreachable_registry_is_an_error_that_names_the_option() -> None:
    done = CliRunner().invoke(command, ["some-worker", "--registry", UNREACHABLE])

    assert done.exit_code == 1
    assert "no registry answers: " in done.output
    assert "give its address with --registry" in done.output
