"""Shutdown of the engine: every wait for it is bounded, and a blocked event loop ends the process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from services.runtime.process import EXIT_FORCED, StartupError
from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine
from services.worker.engines.trtllm.shutdown import EXIT_STUCK, LoopWatch, shut_down
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

ROOT = Path(__file__).parents[4]


class Llm:
    """An engine whose shutdown waits for `may_end`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.has_ended = threading.Event()
        self._error = error

    def shutdown(self) -> None:
        self.may_end.wait()
        self.has_ended.set()
        if self._error is not None:
            raise self._error


@pytest.mark.parametrize("error", [None, RuntimeError("a rank is gone")])
def test_shutdown_waits_for_the_engine_however_its_shutdown_ends(error: Exception | None) -> None:
    llm = Llm(error)
    llm.may_end.set()

    run_async(shut_down(llm, 5.0))

    assert llm.has_ended.is_set()


def test_shutdown_that_does_not_return_is_abandoned_in_time() -> None:
    llm = Llm()

    run_async(shut_down(llm, 0.05))

    assert not llm.has_ended.is_set(), "it returns although the engine has not ended"
    llm.may_end.set()


def test_blocked_event_loop_is_detected_by_the_watch_thread() -> None:
    async def scenario() -> list[float]:
        stuck: list[float] = []
        noticed = threading.Event()

        def on_stuck(silent_s: float) -> None:
            stuck.append(silent_s)
            noticed.set()

        with LoopWatch(2.0, on_stuck, tick_s=0.05):
            await asyncio.sleep(0.2)
            assert not stuck, "the loop is not blocked"
            assert noticed.wait(WAIT_S), "the watch did not report the blocked loop"  # This wait blocks the loop.
        return stuck

    assert run_async(scenario())[0] >= 2.0


LOADING = """
import os, time
from services.runtime.process import run_process
from services.worker.engines.trtllm.shutdown import exiting_on_signals

async def main(stopping):
    with exiting_on_signals():
        print("loading", flush=True)
        time.sleep(20)

run_process(main)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_loading_ends_the_process_at_once(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)

    _, err = process.communicate(timeout=WAIT_S)

    assert process.returncode == EXIT_FORCED
    assert number.name.encode() in err


def test_signal_handlers_are_installed_before_the_package_is_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import takes seconds, too; a signal during it would otherwise take effect after minutes of loading."""
    before, meanwhile = signal.getsignal(signal.SIGTERM), []

    def load_package() -> None:
        meanwhile.append(signal.getsignal(signal.SIGTERM))
        raise StartupError("no driver")

    monkeypatch.setattr("services.worker.engines.trtllm.engine.load_package", load_package)
    engine = TrtLlmEngine(TrtLlmConfig(model=folder, served_model_name="m"))
    with pytest.raises(StartupError):
        run_async(engine.run(lambda _: None, asyncio.Event()))

    assert meanwhile != [before]
    assert signal.getsignal(signal.SIGTERM) == before


DYING = """
import asyncio
from pathlib import Path
from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine
from tests.support.doubles import make_request

async def main():
    engine = TrtLlmEngine(TrtLlmConfig(model=Path({folder!r}), served_model_name="m", loop_s=1.0))
    ready = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(engine.run(lambda _: None, ready))
        await ready.wait()
        engine.submit(1, make_request((7,), ignore_eos=True))
        print("submitted", flush=True)

asyncio.run(main())
"""


FIRST_CALL = """
import time
from services.worker.engines.trtllm.client import Client

Client.start = lambda *_: time.sleep(60)
"""


@pytest.mark.parametrize("before", ["", FIRST_CALL], ids=["at_its_death", "at_the_first_call"])
def test_engine_that_blocks_the_event_loop_ends_the_process(folder: Path, before: str) -> None:
    """The first call that meets the engine's error waits, on the event loop, for processes that are gone."""
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests" / "fakes")])
    faults = {"TLLM_FAKE_DEATH_TOKEN": "7", "TLLM_FAKE_DEATH": "raised", "TLLM_FAKE_SHUTDOWN": "hangs"}

    done = subprocess.run(
        [sys.executable, "-c", before + DYING.format(folder=str(folder))],
        env=os.environ | faults | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )

    assert done.returncode == EXIT_STUCK
    assert "the event loop is stuck in a call into the engine" in done.stdout
