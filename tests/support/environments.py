"""Virtual environments with other versions of dependencies, created when a test first needs them, and kept."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOBUF_6 = [
    "protobuf==6.33.*",
    *(f"grpcio{part}>=1.80,<1.82" for part in ("", "-status", "-health-checking", "-reflection")),
    "uvloop>=0.23,<1",
]
INSTALL_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 60.0


def run(*command: str | Path, timeout_s: float = RUN_TIMEOUT_S, import_path: tuple[Path, ...] = ()) -> str:
    """Run `command` in the checkout, which is also on the import path; return its output. Fails if it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, *import_path)))}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def python_with_protobuf_6() -> Path:
    """Return an interpreter with protobuf 6.33 and a matching gRPC."""
    folder = ROOT / ".venv-protobuf6"
    python = folder / "bin" / "python"

    def make() -> None:
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", folder)
        _install(*PROTOBUF_6, into=f"--python={python}")

    _make_once(folder, str(PROTOBUF_6), make)
    return python


def target_with(requirement: str) -> Path:
    """Return a folder with this distribution alone, without its dependencies, for an import path."""
    folder = ROOT / f".venv-{requirement.partition('==')[0]}"
    _make_once(folder, requirement, lambda: _install(requirement, "--no-deps", "--upgrade", f"--target={folder}"))
    return folder


def _make_once(folder: Path, made_of: str, make: Callable[[], None]) -> None:
    """Create the folder unless it was made from the same packages. Only one process does so at a time."""
    note = folder / "made-of"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not note.exists() or note.read_text() != made_of:
            make()
            note.write_text(made_of)


def _install(*arguments: str, into: str = "") -> None:
    """Install packages. If that is impossible, skip the test; in CI, fail it."""
    options = [into] if into else []
    command = [sys.executable, "-m", "pip", *options, "install", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
    if done.returncode and os.environ.get("CI") != "true":
        pytest.skip(f"pip cannot install {', '.join(arguments)} here: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr
