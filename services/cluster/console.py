"""Terminal output of a local cluster: each line marked with the process that wrote it, and a table of addresses."""

from collections.abc import Sequence
from typing import TextIO

from services.runtime.descriptors.standard import discard

COLOURS = (36, 33, 32, 35, 34, 31)
"""Foreground colour codes of ECMA-48, assigned to the names in turn."""


class Console:
    """Writes whole lines to `stream`, with coloured names if it is a terminal."""

    def __init__(self, names: Sequence[str], stream: TextIO) -> None:
        self._stream = stream
        self._width = max(map(len, names))
        is_coloured = stream.isatty()
        self._marks = {
            name: f"\033[{COLOURS[index % len(COLOURS)]}m{name:{self._width}}\033[0m" if is_coloured else ""
            for index, name in enumerate(names)
        }

    def line(self, name: str, text: str) -> None:
        """Write `text` as a line of the process `name`."""
        mark = self._marks.get(name) or f"{name:{self._width}}"
        self._write(f"{mark} | {text}\n")

    def note(self, name: str, text: str) -> None:
        """Write an event in the life of the process `name`, in square brackets."""
        self.line(name, f"[{text}]")

    warn = note

    def _write(self, text: str) -> None:
        """Write `text` as it is. Ignored if nobody can read it: the cluster goes on without a terminal or a disk."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            discard(self._stream)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as aligned columns. The first row holds the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
