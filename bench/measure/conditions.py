"""Where and how figures were measured: what every page of results says alike."""

import os
import platform
import shlex
import sys
from pathlib import Path


def machine() -> str:
    """Its processor, cores and kernel."""
    return f"{processor()}, {os.cpu_count()} cores, Linux {platform.release()}"


def processor() -> str:
    """As /proc/cpuinfo names it; the architecture where it does not."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def command(module: str) -> str:
    """The one that this process was started with, as one can type it again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])
