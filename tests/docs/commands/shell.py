"""Runs commands of the pages in a shell, with addresses, folders and names replaced by those of the tests."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.docs.pages import ROOT
from tests.support.clock import WAIT_S

BIN = Path(sys.executable).parent
MAKE = f"make --old-file={sys.prefix}/.installed VENV={sys.prefix}"
"""It finds installed what the tests run in, wherever that is."""
RUN_S_MAX = 180.0
"""How long a command may take that ends by itself, on a busy machine."""


class Running:
    """A command that runs until it is ended, with its children, as a terminal would."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process = process
        self._output = output

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self._output.read_text()

    def ctrl_c(self) -> None:
        """A terminal sends it to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)


class Shell:
    """folder: for what commands write. variables: besides those of the tests, without ours and make's."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        given = {name: value for name, value in os.environ.items() if not re.match("DYN_|MAKE|MFLAGS", name)}
        self._variables = given | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)} | variables
        self._count = 0

    def run(self, words: str, here: Mapping[str, str], text: str = "", **variables: str) -> str:
        """What the command prints, given `text` to read. Fails when it fails. here: see `placed`."""
        done = subprocess.run(
            ["bash", "-c", placed(words, here)],
            cwd=ROOT,
            env=self._variables | variables,
            input=text,
            capture_output=True,
            text=True,
            timeout=RUN_S_MAX,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def running(self, words: str, here: Mapping[str, str], **variables: str) -> Iterator[Running]:
        """The command while it runs; it and its children are killed in the end. here: see `placed`."""
        self._count += 1
        output = self.folder / f"{self._count}.log"
        with output.open("w") as file:
            process = subprocess.Popen(
                ["bash", "-c", placed(words, here)],
                cwd=ROOT,
                env=self._variables | variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        running = Running(process, output)
        try:
            yield running
        finally:
            running.kill()


def placed(words: str, here: Mapping[str, str]) -> str:
    """The command with each key of `here` replaced; all of them are in it, so that none is replaced in vain."""
    for there, own in here.items():
        assert there in words, f"{there!r} is not in {words!r}"
        words = words.replace(there, own)
    words = words.replace(".venv/bin/", f"{BIN}/")
    return re.sub(r"^((?:\w+=\S* )*)make ", rf"\1{MAKE} ", words)
