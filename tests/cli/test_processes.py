"""Several processes: each is told what their supervisor was told, but for what that has settled."""

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


def test_each_of_several_processes_has_the_line_of_their_supervisor_and_then_what_that_has_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = ["frontend", "--http-listen=127.0.0.1:0", "--processes=2", "--stall-ms=3000", "--ready-file=all"]
    monkeypatch.setattr("sys.argv", ["unbroken", *line])

    of_process = process_command({"--http-listen": "127.0.0.1:8000"}, Path("folder/frontend-1"), Path("one"))
    given = _given(of_process)

    assert of_process[: len(PROGRAM) + 1] == [*PROGRAM, "frontend"]
    assert (given["http_listen"], given["stall_ms"]) == ("127.0.0.1:8000", 3000)
    assert (given["member"], given["ready_file"]) == (Path("folder/frontend-1"), Path("one"))


def test_all_options_that_say_where_are_settled_by_the_supervisor() -> None:
    """One that was not would be a port of which each process but the first finds that it is in use."""
    wheres = {option.opts[0]: option.name for option in command.params if option.opts[0].endswith("-listen")}

    assert wheres == LISTENS
