"""What a process uses is read right from outside, and a quantile says nothing of what was not seen."""

import os
import subprocess
import sys
import threading
import time

import pytest

from bench.measure import process_usage
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds, cpu_seconds_of, memory_kib, memory_peak

WAIT_S = 15.0


def test_cpu_time_of_a_process_is_its_own_measure() -> None:
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.01)
    assert cpu_seconds_of([os.getpid(), os.getpid()]) == pytest.approx(2 * time.process_time(), abs=0.01)


def test_a_process_that_is_gone_is_told() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    for measure in (cpu_seconds, memory_kib):
        with pytest.raises(BenchError, match=f"process {child.pid} is gone"):
            measure(child.pid)


def test_the_peak_of_memory_is_at_least_what_there_was_at_first() -> None:
    before = memory_kib(os.getpid())

    with memory_peak(os.getpid()) as peak:
        pass

    assert peak.kib >= before > 1024


def test_the_peak_of_a_process_that_ends_meanwhile_is_what_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "MEMORY_EVERY_S", 0.001)
    others = set(threading.enumerate())
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as child, memory_peak(child.pid) as peak:
        child.kill()
        child.wait()
        for watching in set(threading.enumerate()) - others:
            watching.join(WAIT_S)
            assert not watching.is_alive()

    assert peak.kib > 0
