"""A member of a cluster: kept alive under one name, and never left behind."""

import asyncio
import io
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.cluster.console import Console
from services.runtime.backoff import Backoff
from services.runtime.loop import run_on_loop
from services.runtime.process import StartupError
from services.runtime.supervision.child import Child, ChildConfig, describe_exit, read_ready

WAIT_S = 20.0
SERVES = (
    "import pathlib, sys, time; print('hello', flush=True); "
    'pathlib.Path(sys.argv[1]).write_text(\'{"address": "here:1"}\'); time.sleep(60)'
)
DIES = "import sys; print('no such model'); sys.exit(3)"
NEVER_READY = "import time; time.sleep(60)"
ORDERLY = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); " + SERVES
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SERVES


async def until(condition: Callable[[], Any]) -> Any:
    """What `condition` returns, once that is true."""
    async with asyncio.timeout(WAIT_S):
        while not (value := condition()):
            await asyncio.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Stage:
    """One member that runs `script`, and what became of it."""

    def __init__(self, folder: Path, script: str, **config: Any) -> None:
        self.output = io.StringIO()
        self.changes: list[int | None] = []
        self.member = Child(
            "worker-1",
            lambda ready_file, _known: [sys.executable, "-c", script, str(ready_file)],
            ChildConfig(**config),
            console=Console(["worker-1"], self.output),
            folder=folder,
            on_change=lambda: self.changes.append(self.pid),
            rng=random.Random(0),
        )

    @property
    def pid(self) -> int | None:
        return self.member.serving.pid if self.member.serving is not None else None

    def play(self, scene: Callable[[], Awaitable[None]]) -> None:
        """Run `scene` while the member lives, then end the member."""

        async def run() -> None:
            async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as lives:
                self.member.start(lives)
                try:
                    await scene()
                finally:
                    await self.member.end()

        run_on_loop(run())


def test_serves_once_the_ready_file_says_where(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SERVES)

    async def scene() -> None:
        await stage.member.wait_serving()

        assert stage.member.known == {"address": "here:1"}
        assert stage.pid is not None
        assert is_alive(stage.pid)

    stage.play(scene)

    assert "worker-1 | hello\n" in stage.output.getvalue()
    assert "address here:1" in stage.output.getvalue()


def test_a_process_that_died_is_started_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SERVES)

    async def scene() -> None:
        await stage.member.wait_serving()
        assert stage.pid is not None
        os.kill(stage.pid, signal.SIGKILL)
        await until(lambda: len(stage.changes) == 2)

        assert stage.changes[0] != stage.changes[1]

    stage.play(scene)

    assert re.search(r"was killed by SIGKILL\]\n.*starting again in 0\.\d+ s", stage.output.getvalue())


def test_a_process_that_died_stays_dead_when_asked_to(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SERVES, is_restarted=False)

    async def scene() -> None:
        await stage.member.wait_serving()
        assert stage.pid is not None
        os.kill(stage.pid, signal.SIGTERM)
        await until(lambda: len(stage.changes) == 2)

        assert stage.pid is None
        assert stage.member.known == {"address": "here:1"}

    stage.play(scene)

    assert "was killed by SIGTERM; left dead" in stage.output.getvalue()


def test_a_death_before_the_first_readiness_is_an_error_with_the_last_lines(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DIES)

    async def scene() -> None:
        with pytest.raises(StartupError, match=r"worker-1 exited with status 3 .*\n  no such model"):
            await stage.member.wait_serving()

    stage.play(scene)


def test_a_process_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, NEVER_READY, ready_timeout_s=0.1)

    async def scene() -> None:
        with pytest.raises(StartupError, match="was killed by SIGKILL before it was ready"):
            await stage.member.wait_serving()

    stage.play(scene)

    assert "was not ready within 0.1 s" in stage.output.getvalue()


def test_a_process_that_does_not_end_is_killed(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DEAF, end_timeout_s=0.1)
    pids: list[int] = []

    async def scene() -> None:
        await stage.member.wait_serving()
        pids.append(stage.pid or 0)

    stage.play(scene)

    assert "did not end within 0.1 s: killed" in stage.output.getvalue()
    assert not is_alive(pids[0])


def test_a_process_whose_streams_may_go_on_has_that_time_to_end(tmp_path: Path) -> None:
    """`unbroken up` once killed workers after 10 s, though streams were promised 30 s."""
    slow = ORDERLY.replace("sys.exit(0)", "[time.sleep(0.5), sys.exit(0)]")
    stage = Stage(tmp_path, slow, end_timeout_s=0.1, drain_timeout_s=WAIT_S)

    async def scene() -> None:
        await stage.member.wait_serving()

    stage.play(scene)

    assert "killed" not in stage.output.getvalue()


def test_a_stopped_process_still_ends_in_order(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ORDERLY)

    async def scene() -> None:
        await stage.member.wait_serving()
        assert stage.pid is not None
        os.kill(stage.pid, signal.SIGSTOP)

    stage.play(scene)

    assert "killed" not in stage.output.getvalue()


def test_the_end_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    stage = Stage(tmp_path, SERVES, backoff=Backoff(base_s=1000, cap_s=1000))

    async def scene() -> None:
        await stage.member.wait_serving()
        assert stage.pid is not None
        os.kill(stage.pid, signal.SIGKILL)
        await until(lambda: "starting again" in stage.output.getvalue())

    stage.play(scene)

    assert len(stage.changes) == 1


def test_a_cancelled_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    stage = Stage(tmp_path, DEAF)
    pids: list[int] = []

    async def run() -> None:
        async with asyncio.TaskGroup() as lives:
            stage.member.start(lives)
            await stage.member.wait_serving()
            pids.append(stage.pid or 0)
            raise StartupError("another one failed")

    with pytest.raises(ExceptionGroup):
        run_on_loop(run())

    assert not is_alive(pids[0])


def test_a_process_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    supervisor_script = (
        "import subprocess, sys, time\n"
        "from services.runtime.supervision.pdeathsig import tethered\n"
        "subprocess.Popen(tethered([sys.executable, '-c', sys.argv[1], sys.argv[2]])).wait()"
    )
    ready_file = tmp_path / "ready"
    script = (
        "import json, os, pathlib, sys, time; "
        "pathlib.Path(sys.argv[1]).write_text(json.dumps({'pid': str(os.getpid())})); time.sleep(60)"
    )

    with subprocess.Popen([sys.executable, "-c", supervisor_script, script, str(ready_file)]) as supervisor:
        ready = run_on_loop(until(lambda: read_ready(ready_file)))
        pid = int(ready["pid"])
        assert is_alive(pid)
        supervisor.kill()

    run_on_loop(until(lambda: not is_alive(pid)))


def test_a_long_line_is_cut_and_a_last_line_needs_no_end(tmp_path: Path) -> None:
    script = "import sys; sys.stdout.write('x' * 200_000); sys.exit(1)"
    stage = Stage(tmp_path, script)

    async def scene() -> None:
        with pytest.raises(StartupError):
            await stage.member.wait_serving()

    stage.play(scene)

    assert max(map(len, stage.output.getvalue().splitlines())) < 140_000
    assert stage.output.getvalue().count("x") == 200_000


@pytest.mark.parametrize(
    ("text", "ready"),
    [
        ('{"grpc": "a:1", "http": "a:2"}', {"grpc": "a:1", "http": "a:2"}),
        ("", None),
        ('{"grpc": "a', None),
    ],
)
def test_a_ready_file_is_an_object_and_may_be_half_written(
    tmp_path: Path, text: str, ready: dict[str, str] | None
) -> None:
    (tmp_path / "ready").write_text(text)

    assert read_ready(tmp_path / "ready") == ready


def test_an_exit_is_told_in_words() -> None:
    assert describe_exit(1) == "exited with status 1"
    assert describe_exit(-9) == "was killed by SIGKILL"
    assert describe_exit(-40) == "was killed by signal 40"
