"""The console marks each line with the process that wrote it."""

import io

from services.cluster.console import Console, table


def test_lines_are_marked_and_names_are_coloured_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, coloured = io.StringIO(), Terminal()
    for stream in (plain, coloured):
        Console(["up", "worker-1"], stream).line("up", "text")

    assert plain.getvalue() == "up       | text\n"
    assert coloured.getvalue() == "\033[36mup      \033[0m | text\n"


def test_table_has_aligned_columns() -> None:
    assert table([["name", "pid"], ["registry", "7"]]) == "name      pid\nregistry  7"
