"""The commands of the pages that need no cluster do what they say."""

from pathlib import Path

from tests.docs.commands.shell import BIN, Shell
from tests.docs.pages import ROOT, command

RESULTS = ROOT / "bench" / "results"


def pages() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in RESULTS.iterdir()}


def test_the_activated_shell_finds_unbroken(tmp_path: Path) -> None:
    printed = Shell(tmp_path, PATH="/usr/bin:/bin").run(f"{command('. .venv/bin/activate')}; command -v unbroken", {})

    assert printed.strip() == f"{BIN}/unbroken"


def test_ulimit_prints_how_many_files_may_be_open(tmp_path: Path) -> None:
    assert int(Shell(tmp_path).run(command("ulimit -n"), {})) > 0


def test_a_small_hold_leaves_the_pages_of_results_alone(tmp_path: Path) -> None:
    before = pages()
    words = f"{command('.venv/bin/python -m bench.hold')} --seconds 0.5 --itl-ms 50"

    Shell(tmp_path).run(words, {"--streams 300": "--streams 20", "/tmp/hold": str(tmp_path)})

    assert "| streams held, streams lost | 20, 0 |" in (tmp_path / "hold.md").read_text()
    assert pages() == before


def test_a_small_scale_leaves_the_pages_of_results_alone(tmp_path: Path) -> None:
    before = pages()
    words = f"{command('.venv/bin/python -m bench.scale')} --repeats 1 --only admit"

    Shell(tmp_path).run(words, {"--size-max 100": "--size-max 10", "/tmp/scale": str(tmp_path)})

    assert "| admit and route, µs | workers |" in (tmp_path / "scale.md").read_text()
    assert pages() == before
