"""Runs a server of this project as a process of its own, for tools that are clients."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.docs.pages import ROOT


@contextmanager
def serving_program(module: str) -> Iterator[int]:
    """Run a module that prints its port while the context is open. Yields the port."""
    with subprocess.Popen([sys.executable, "-m", module], stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()
