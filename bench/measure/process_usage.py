"""What a process uses, read from outside of it: CPU time and memory; and quantiles of what was seen."""

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
    """User and system time of all threads, in nanoseconds' steps. Raises BenchError if the process is gone.

    Source of the clock's number: `clock_getcpuclockid(3)`; Linux has MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
    """
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError as error:
        raise BenchError(f"process {pid} is gone") from error


def cpu_seconds_of(pids: Iterable[int]) -> float:
    return sum(map(cpu_seconds, pids))


def memory_kib(pid: int) -> float:
    """Resident. Raises BenchError if the process is gone. Source: proc(5), `statm`."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB
    except (OSError, IndexError) as error:
        raise BenchError(f"process {pid} is gone") from error


@dataclass
class Peak:
    """The most that was resident at a time."""

    kib: float = 0.0


@contextmanager
def memory_peak(pid: int) -> Iterator[Peak]:
    """Looked at every MEMORY_EVERY_S while the context is open and the process is there."""
    peak, is_over = Peak(memory_kib(pid)), threading.Event()

    def observation() -> None:
        with suppress(BenchError):  # Gone: there is nothing more to see, and whoever asks it notices.
            while not is_over.wait(MEMORY_EVERY_S):
                peak.kib = max(peak.kib, memory_kib(pid))

    thread = threading.Thread(target=observation)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()
