"""PROGRAM starts this program, wherever the user's current directory is."""

import subprocess
from pathlib import Path

from services.runtime.supervision.program import PROGRAM


def test_program_ignores_a_folder_named_services_in_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit(7)")

    assert subprocess.run([*PROGRAM, "--version"], cwd=tmp_path, capture_output=True, check=False).returncode == 0
