"""A command with a parent-death signal dies with its parent, even if the parent is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.loop import run_on_loop
from services.runtime.supervision.child import read_ready
from services.runtime.supervision.pdeathsig import with_parent_death_signal
from tests.runtime.supervision.support import is_alive, until

SUPERVISOR = (
    "import subprocess, sys, time\n"
    "from services.runtime.supervision.pdeathsig import with_parent_death_signal\n"
    "subprocess.Popen(with_parent_death_signal([sys.executable, '-c', sys.argv[1], sys.argv[2]])).wait()"
)
WRITES_ITS_PID = (
    "import json, os, pathlib, sys, time; "
    "pathlib.Path(sys.argv[1]).write_text(json.dumps({'pid': str(os.getpid())})); time.sleep(60)"
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_child_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"

    with subprocess.Popen([sys.executable, "-c", SUPERVISOR, WRITES_ITS_PID, str(ready_file)]) as supervisor:
        ready = run_on_loop(until(lambda: read_ready(ready_file)))
        pid = int(ready["pid"])
        assert is_alive(pid)
        supervisor.kill()

    run_on_loop(until(lambda: not is_alive(pid)))


def test_command_does_not_run_if_its_parent_has_already_ended() -> None:
    _python, *options, _parent_pid, _program = with_parent_death_signal(["/bin/echo"])

    done = subprocess.run([sys.executable, *options, "1", "/bin/echo"], capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (1, b"")


def test_command_replaces_the_wrapper_and_keeps_its_exit_status() -> None:
    command = with_parent_death_signal([sys.executable, "-c", "raise SystemExit(7)"])

    assert subprocess.run(command, check=False).returncode == 7
