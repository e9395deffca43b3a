"""What people see of a local cluster: every line marked with the process that says it, and a table at the end."""

from collections.abc import Sequence
from typing import TextIO

COLOURS = (36, 33, 32, 35, 34, 31)
"""Foreground codes of ECMA-48, one after another for the names."""


class Console:
    """Writes whole lines to `stream`; coloured names on a terminal."""

    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        self._stream = stream
        self._width = max(map(len, names))
        is_coloured = stream.isatty()
        self._marks = {
            name: f"\033[{COLOURS[index % len(COLOURS)]}m{name:{self._width}}\033[0m" if is_coloured else ""
            for index, name in enumerate(names)
        }

    def line(self, name: str, text: str) -> None:
        """`text` as said by `name`."""
        mark = self._marks.get(name) or f"{name:{self._width}}"
        self._stream.write(f"{mark} | {text}\n")
        self._stream.flush()

    def note(self, name: str, text: str) -> None:
        """What becomes of `name`, as said by us."""
        self.line(name, f"[{text}]")

    warn = note


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns, the first row being the heads."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
