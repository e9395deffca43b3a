"""The README's commands that need no cluster do what it says."""

from pathlib import Path

from tests.readme.page import ROOT, command
from tests.readme.shell import BIN, Shell

RESULTS = ROOT / "bench" / "results"


def pages() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in RESULTS.iterdir()}


def test_the_shell_finds_unbroken(tmp_path: Path) -> None:
    printed = Shell(tmp_path, PATH="/usr/bin:/bin").run(f"{command('. .venv/bin/activate')}; command -v unbroken", {})

    assert printed.strip() == f"{BIN}/unbroken"


def test_the_bound_of_files_is_told(tmp_path: Path) -> None:
    assert int(Shell(tmp_path).run(command("ulimit -n"), {})) > 0


def test_few_streams_are_held_and_the_pages_are_left_alone(tmp_path: Path) -> None:
    before = pages()
    words = f"{command('.venv/bin/python -m bench.hold')} --seconds 0.5 --itl-ms 50"

    Shell(tmp_path).run(words, {"--streams 300": "--streams 20", "/tmp/hold": str(tmp_path)})

    assert "| streams held, and lost | 20, 0 |" in (tmp_path / "hold.md").read_text()
    assert pages() == before


def test_what_little_costs_is_measured_and_the_pages_are_left_alone(tmp_path: Path) -> None:
    before = pages()
    words = f"{command('.venv/bin/python -m bench.scale')} --repeats 1 --only admit"

    Shell(tmp_path).run(words, {"--size-max 100": "--size-max 10", "/tmp/scale": str(tmp_path)})

    assert "| admit and route, µs | workers |" in (tmp_path / "scale.md").read_text()
    assert pages() == before
