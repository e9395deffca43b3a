"""Where and how figures were measured: the facts that every page of results states."""

import os
import platform
import shlex
import sys
from pathlib import Path


def machine() -> str:
    """Return the processor, the number of cores and the kernel."""
    return f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"


def processor() -> str:
    """Return the processor's name from /proc/cpuinfo; the architecture if it has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command(module: str) -> str:
    """Return the command line of this process in a form that can be typed again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])
