"""Child keeps one process running under one name, reports how it exits, and leaves no process behind."""

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from services.runtime.backoff import Backoff
from services.runtime.loop import run_on_loop
from services.runtime.process import StartupError
from services.runtime.supervision.child import describe_exit, read_ready
from tests.runtime.supervision.support import (
    EXITS,
    IGNORES_SIGTERM,
    NEVER_READY,
    SERVES,
    STOPS_ON_SIGTERM,
    Supervised,
    is_alive,
    until,
)
from tests.support.clock import WAIT_S


def run(supervised: Supervised, scenario: Callable[[], Awaitable[None]]) -> None:
    """Run `scenario` while the child is supervised, then stop the child."""

    async def run() -> None:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            supervised.child.start(group)
            try:
                await scenario()
            finally:
                await supervised.child.stop()

    run_on_loop(run())


def test_child_serves_once_its_ready_file_exists(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SERVES)

    async def scenario() -> None:
        await supervised.child.wait_serving()

        assert supervised.child.last_ready == {"address": "here:1"}
        assert supervised.pid is not None
        assert is_alive(supervised.pid)

    run(supervised, scenario)

    assert "worker-1 | hello\n" in supervised.output.getvalue()
    assert "address here:1" in supervised.output.getvalue()


def test_process_that_exits_is_restarted(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SERVES)

    async def scenario() -> None:
        await supervised.child.wait_serving()
        assert supervised.pid is not None
        os.kill(supervised.pid, signal.SIGKILL)
        await until(lambda: len(supervised.changes) == 2)

        assert supervised.changes[0] != supervised.changes[1]

    run(supervised, scenario)

    assert re.search(r"was killed by SIGKILL\]\n.*starting again in 0\.\d+ s", supervised.output.getvalue())


def test_process_that_exits_is_not_restarted_if_restarts_are_off(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SERVES, is_restarted=False)

    async def scenario() -> None:
        await supervised.child.wait_serving()
        assert supervised.pid is not None
        os.kill(supervised.pid, signal.SIGTERM)
        await until(lambda: len(supervised.changes) == 2)

        assert supervised.pid is None
        assert supervised.child.last_ready == {"address": "here:1"}

    run(supervised, scenario)

    assert "was killed by SIGTERM; not restarted" in supervised.output.getvalue()


def test_exit_before_the_first_readiness_is_an_error_with_the_last_output(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, EXITS)

    async def scenario() -> None:
        with pytest.raises(StartupError, match=r"worker-1 exited with status 3 .*\n  no such model"):
            await supervised.child.wait_serving()

    run(supervised, scenario)


def test_process_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, NEVER_READY, ready_timeout_s=0.1)

    async def scenario() -> None:
        with pytest.raises(StartupError, match="was killed by SIGKILL before it was ready"):
            await supervised.child.wait_serving()

    run(supervised, scenario)

    assert "was not ready within 0.1 s" in supervised.output.getvalue()


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, IGNORES_SIGTERM, stop_timeout_s=0.1)
    pids: list[int] = []

    async def scenario() -> None:
        await supervised.child.wait_serving()
        pids.append(supervised.pid or 0)

    run(supervised, scenario)

    assert "did not exit within 0.1 s: killed" in supervised.output.getvalue()
    assert not is_alive(pids[0])


def test_process_is_not_killed_within_its_drain_timeout(tmp_path: Path) -> None:
    """A bug: `unbroken up` killed workers after 10 s although their streams had 30 s."""
    slow = STOPS_ON_SIGTERM.replace("sys.exit(0)", "[time.sleep(0.5), sys.exit(0)]")
    supervised = Supervised(tmp_path, slow, stop_timeout_s=0.1, drain_timeout_s=WAIT_S)

    async def scenario() -> None:
        await supervised.child.wait_serving()

    run(supervised, scenario)

    assert "killed" not in supervised.output.getvalue()


def test_process_that_was_stopped_by_sigstop_still_handles_sigterm(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, STOPS_ON_SIGTERM)

    async def scenario() -> None:
        await supervised.child.wait_serving()
        assert supervised.pid is not None
        os.kill(supervised.pid, signal.SIGSTOP)

    run(supervised, scenario)

    assert "killed" not in supervised.output.getvalue()


def test_stop_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SERVES, backoff=Backoff(base_s=1000, cap_s=1000))

    async def scenario() -> None:
        await supervised.child.wait_serving()
        assert supervised.pid is not None
        os.kill(supervised.pid, signal.SIGKILL)
        await until(lambda: "starting again" in supervised.output.getvalue())

    run(supervised, scenario)

    assert len(supervised.changes) == 1


def test_cancelled_supervisor_kills_its_child(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, IGNORES_SIGTERM)
    pids: list[int] = []

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            supervised.child.start(group)
            await supervised.child.wait_serving()
            pids.append(supervised.pid or 0)
            raise StartupError("another child failed")

    with pytest.raises(ExceptionGroup):
        run_on_loop(scenario())

    assert not is_alive(pids[0])


def test_long_line_is_split_and_the_last_line_needs_no_newline(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.write('x' * 200_000); sys.exit(1)"
    supervised = Supervised(tmp_path, script)

    async def scenario() -> None:
        with pytest.raises(StartupError):
            await supervised.child.wait_serving()

    run(supervised, scenario)

    assert max(map(len, supervised.output.getvalue().splitlines())) < 140_000
    assert supervised.output.getvalue().count("x") == 200_000


@pytest.mark.parametrize(
    ("text", "ready"),
    [
        ('{"grpc": "a:1", "http": "a:2"}', {"grpc": "a:1", "http": "a:2"}),
        ("", None),
        ('{"grpc": "a', None),
    ],
)
def test_ready_file_is_a_json_object_and_an_incomplete_one_is_ignored(
    tmp_path: Path, text: str, ready: dict[str, str] | None
) -> None:
    (tmp_path / "ready").write_text(text)

    assert read_ready(tmp_path / "ready") == ready


def test_describe_exit_names_the_status_or_the_signal() -> None:
    assert describe_exit(1) == "exited with status 1"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"
