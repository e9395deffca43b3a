"""CPU time and memory of a process are read correctly from outside."""

import os
import subprocess
import sys
import threading
import time

import pytest

from bench.measure import process_usage
from bench.measure.errors import BenchError
from bench.measure.process_usage import cpu_seconds, cpu_seconds_of, memory_kib, memory_peak
from tests.support.clock import WAIT_S


def test_cpu_time_equals_what_the_process_itself_measures() -> None:
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.01)
    assert cpu_seconds_of([os.getpid(), os.getpid()]) == pytest.approx(2 * time.process_time(), abs=0.01)


def test_missing_process_is_reported() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    for measure in (cpu_seconds, memory_kib):
        with pytest.raises(BenchError, match=f"process {child.pid} is gone"):
            measure(child.pid)


def test_memory_peak_is_at_least_the_memory_at_the_start() -> None:
    before = memory_kib(os.getpid())

    with memory_peak(os.getpid()) as peak:
        pass

    assert peak.kib >= before > 1024


def test_memory_peak_of_a_process_that_exits_is_what_was_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_usage, "MEMORY_EVERY_S", 0.001)
    others = set(threading.enumerate())
    with subprocess.Popen([sys.executable], stdin=subprocess.PIPE) as child, memory_peak(child.pid) as peak:
        child.kill()
        child.wait()
        for watching in set(threading.enumerate()) - others:
            watching.join(WAIT_S)
            assert not watching.is_alive()

    assert peak.kib > 0
