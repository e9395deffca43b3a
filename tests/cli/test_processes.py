"""Several processes: each gets the options of the supervisor, with its own addresses and files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.cli.frontend import command
from services.cli.processes import LISTENS, process_command
from services.runtime.supervision.program import PROGRAM


def _given(line: Sequence[str]) -> dict[str, Any]:
    with command.make_context("unbroken frontend", [*line[len(PROGRAM) + 1 :]]) as context:
        return context.params


def test_process_command_repeats_the_supervisors_options_and_overrides_addresses_and_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = ["frontend", "--http-listen=127.0.0.1:0", "--processes=2", "--stall-ms=3000", "--ready-file=all"]
    monkeypatch.setattr("sys.argv", ["unbroken", *line])

    of_process = process_command({"--http-listen": "127.0.0.1:8000"}, Path("folder/frontend-1"), Path("one"))
    given = _given(of_process)

    assert of_process[: len(PROGRAM) + 1] == [*PROGRAM, "frontend"]
    assert (given["http_listen"], given["stall_ms"]) == ("127.0.0.1:8000", 3000)
    assert (given["member"], given["ready_file"]) == (Path("folder/frontend-1"), Path("one"))


def test_supervisor_overrides_every_listen_option() -> None:
    """Otherwise every process but the first would find its port in use."""
    wheres = {option.opts[0]: option.name for option in command.params if option.opts[0].endswith("-listen")}

    assert wheres == LISTENS
