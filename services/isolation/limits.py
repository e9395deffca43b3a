"""The limits that a fork server and its helpers set themselves. They keep to the process that sets them."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATM = Path("/proc/self/statm")


def prepare(stack_bytes_max: int) -> None:
    """Bound the stack, write no core file, and ignore signals that are meant for the parent.

    A service manager sends SIGTERM to all processes of a service, but the parent still drains its streams. It ends this
    process when it ends itself.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    stack = stack_bytes_max if hard == resource.RLIM_INFINITY else min(stack_bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


@contextmanager
def bounded(cpu_s_max: float, bytes_max: int) -> Iterator[None]:
    """Bound the processor time and the growth of memory within the block.

    Beyond the first, SIGPROF ends the process. Beyond the second, allocations fail: in Python with MemoryError.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = resource.RLIM_INFINITY if (size := _size_bytes()) is None else size + bytes_max
    if hard != resource.RLIM_INFINITY and (limit == resource.RLIM_INFINITY or limit > hard):
        limit = hard
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    signal.setitimer(signal.ITIMER_PROF, cpu_s_max)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # The block may have lowered it, for good.
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def _size_bytes() -> int | None:
    """The address space in use; None where the system does not tell."""
    try:
        pages = int(_STATM.read_bytes().split()[0])
    except OSError:
        return None
    return pages * resource.getpagesize()
