"""CPU time and memory of a process, read from outside."""

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.measure.errors import BenchError

PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024
MEMORY_EVERY_S = 0.05


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of all threads, with nanosecond resolution. Raises BenchError if the process is
    gone.

    Source of the clock id: `clock_getcpuclockid(3)`; Linux has MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as error:
        raise BenchError(f"process {pid} is gone") from error


def cpu_seconds_of(pids: Iterable[int]) -> float:
    return sum(map(cpu_seconds, pids))


def memory_kib(pid: int) -> float:
    """Return the resident memory. Raises BenchError if the process is gone. Source: proc(5), `statm`."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB
    except (OSError, IndexError) as error:
        raise BenchError(f"process {pid} is gone") from error


@dataclass
class Peak:
    """The highest resident memory that was seen."""

    kib: float = 0.0


@contextmanager
def memory_peak(pid: int) -> Iterator[Peak]:
    """Sample the resident memory every MEMORY_EVERY_S until the context ends or the process is gone."""
    peak, is_over = Peak(memory_kib(pid)), threading.Event()

    def watch() -> None:
        with suppress(BenchError):  # The process is gone; whoever sends it a request notices.
            while not is_over.wait(MEMORY_EVERY_S):
                peak.kib = max(peak.kib, memory_kib(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
