"""Ending the engine: nothing waits for it without a bound, and a loop that is stuck ends the process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from services.runtime.process import EXIT_FORCED, StartupError
from services.worker.engines.trtllm import TrtLlmConfig, TrtLlmEngine
from services.worker.engines.trtllm.shutdown import EXIT_STUCK, LoopWatch, shut_down
from tests.support.doubles import run_async

ROOT = Path(__file__).parents[4]


class Llm:
    """Its shutdown waits until it is let go."""

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
def test_a_shutdown_is_waited_for_however_it_ends(error: Exception | None) -> None:
    llm = Llm(error)
    llm.may_end.set()

    run_async(shut_down(llm, 5.0))

    assert llm.has_ended.is_set()


def test_a_shutdown_that_does_not_return_is_left_behind() -> None:
    llm = Llm()
    began = time.monotonic()

    run_async(shut_down(llm, 0.05))

    assert time.monotonic() - began < 2
    assert not llm.has_ended.is_set()
    llm.may_end.set()


def test_a_loop_that_stands_still_is_noticed_by_the_thread() -> None:
    async def scenario() -> list[float]:
        stuck: list[float] = []
        noticed = threading.Event()

        def on_stuck(silent_s: float) -> None:
            stuck.append(silent_s)
            noticed.set()

        with LoopWatch(0.5, on_stuck, tick_s=0.05):
            await asyncio.sleep(0.2)
            assert not stuck, "the loop runs"
            assert noticed.wait(5), "this holds the loop up"
        return stuck

    assert run_async(scenario())[0] >= 0.5


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
def test_whoever_ends_the_process_while_it_loads_does_not_wait(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)

    _, err = process.communicate(timeout=10)

    assert process.returncode == EXIT_FORCED
    assert number.name.encode() in err


def test_the_import_is_part_of_loading(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, too, and a signal that comes in it would be heard after minutes of loading."""
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
def test_an_engine_that_holds_up_the_loop_ends_the_process(folder: Path, before: str) -> None:
    """Whoever meets its error first has to wait, on the event loop, for processes that are gone."""
    paths = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(ROOT / "tests" / "fakes")])
    faults = {"TLLM_FAKE_DEATH_TOKEN": "7", "TLLM_FAKE_DEATH": "raised", "TLLM_FAKE_SHUTDOWN": "hangs"}

    done = subprocess.run(
        [sys.executable, "-c", before + DYING.format(folder=str(folder))],
        env=os.environ | faults | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )

    assert done.returncode == EXIT_STUCK
    assert "the event loop is stuck in a call into the engine" in done.stdout
