"""A process stops on a signal, exits at once on a second one, and prints one sentence if it cannot start."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.runtime.process import EXIT_FORCED, write_atomically
from tests.support.clock import WAIT_S

RUN = """
import asyncio
from services.runtime.process import StartupError, run_process

async def main(stopping):
    {body}

run_process(main)
"""


def start(body: str) -> subprocess.Popen[str]:
    code = RUN.format(body=body)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=WAIT_S)
    return process.returncode, out, err


def test_process_runs_on_uvloop() -> None:
    status, out, _ = finish(start("print(type(asyncio.get_running_loop()).mro())"))

    assert status == 0
    assert "uvloop" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_sets_stopping_and_main_returns_by_itself(number: signal.Signals) -> None:
    process = start("print('up', flush=True); await stopping.wait(); print('in order', flush=True)")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)

    status, out, _ = finish(process)

    assert status == 0
    assert out.splitlines()[-1] == "in order"


def test_second_signal_exits_at_once() -> None:
    body = "print('up', flush=True); await stopping.wait(); print('stopping', flush=True); await asyncio.Event().wait()"
    process = start(body)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)

    assert finish(process)[0] == EXIT_FORCED


@pytest.mark.parametrize(
    "error",
    [
        "StartupError('the port is taken')",
        "ExceptionGroup('', [StartupError('the port is taken')])",
        "ExceptionGroup('', [ExceptionGroup('', [StartupError('the port is taken')])])",
    ],
)
def test_startup_error_is_printed_as_one_sentence(error: str) -> None:
    assert finish(start(f"raise {error}")) == (1, "", "error: the port is taken\n")


@pytest.mark.parametrize("error", ["ZeroDivisionError('a bug')", "ExceptionGroup('', [ZeroDivisionError('a bug')])"])
def test_other_exception_is_printed_as_a_traceback(error: str) -> None:
    status, _, said = finish(start(f"raise {error}"))

    assert status == 1
    assert "Traceback" in said
    assert "ZeroDivisionError: a bug" in said


LEAVE = """
import atexit, sys, time
from services.runtime.process import StartupError, exiting_at_once, run_process

atexit.register(time.sleep, 60)

async def main(stopping):
    {body}

with exiting_at_once():
    run_process(main)
"""


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("print('in order')", 0, "in order"),
        ("raise StartupError('the port is taken')", 1, "error: the port is taken"),
        ("raise ZeroDivisionError('a bug')", 1, "ZeroDivisionError: a bug"),
        ("print('to nobody'); sys.stdout.close()", 0, "to nobody"),
    ],
)
def test_exiting_at_once_keeps_status_and_output_but_skips_exit_handlers(body: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE.format(body=body)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )

    assert done.returncode == status
    assert said in done.stdout + done.stderr


def test_write_atomically_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    write_atomically(path, "a long first text")
    before = path.stat().st_ino
    write_atomically(path, "second")

    assert path.read_text() == "second"
    assert path.stat().st_ino != before, "a file written in place could be read half-written"
    assert list(tmp_path.iterdir()) == [path]
