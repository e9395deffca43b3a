"""Tests read the log of another process only while they wait for a line, or up to a moment that the process has passed.

A process logs some things after it has answered, so a line may be missing for a moment, however quiet the machine is.
`Process.events` is for the conditions of `until`; everything else uses `logged` or `events_until_now`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
READERS = {"events", "log_file"}
CONDITIONS = ("is_", "has_", "are_", "have_")


def test_logs_are_read_only_in_conditions() -> None:
    files = [path for folder in ("integration", "clients") for path in (TESTS / folder).rglob("*.py")]
    unwaited = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in files
        if "harness" not in path.parts
        for line in unwaited_reads(ast.parse(path.read_text()))
    ]

    assert len(files) > 50
    assert unwaited == [], "use `events_until_now`, or `logged` to wait for a line"


def test_read_outside_a_condition_is_found() -> None:
    code = "def test():\n    until(lambda: one.events('a'))\n    assert one.events('a')\n    one.log_file.read_text()\n"

    assert list(unwaited_reads(ast.parse(code))) == [3, 4]


def unwaited_reads(node: ast.AST) -> Iterator[int]:
    """The lines in which a log is read, other than in a lambda or in a function whose name is a condition's."""
    if isinstance(node, ast.Attribute) and node.attr in READERS:
        yield node.lineno
    is_condition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(CONDITIONS)
    if not is_condition and not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from unwaited_reads(child)
