"""What a process uses, read from outside of it: CPU time and memory; and quantiles of what was seen."""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.ask import BenchError

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

    def watch() -> None:
        with suppress(BenchError):  # Gone: there is nothing more to see, and whoever asks it notices.
            while not is_over.wait(MEMORY_EVERY_S):
                peak.kib = max(peak.kib, memory_kib(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def quantile(values: Sequence[float], share: float) -> float | None:
    """The least value that so large a share does not exceed, so p99 of fewer than 100 is the largest.

    None of too few: p99 needs 20 of them, p99.9 200.
    """
    if len(values) * (1 - share) < 0.2 - 1e-9:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def milliseconds(
    values_s: Sequence[float], name: str, shares: Sequence[float] = (0.5, 0.99, 0.999)
) -> dict[str, float | None]:
    """By `name_p50` and the like: quantiles of seconds, in ms."""
    quantiles = {share: quantile(values_s, share) for share in shares}
    return {f"{name}_p{share * 100:g}": None if value is None else value * 1e3 for share, value in quantiles.items()}
