"""SECURITY.md names a test for each line of what is protected, and each of them exists."""

import ast
import re

from tests.docs.pages import ROOT

PAGE = ROOT / "SECURITY.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")
RISKS = 10


def rows() -> list[str]:
    """The lines of the tables under "What is protected", without their heads."""
    _, _, protected = PAGE.read_text().partition("## What is protected")
    return [
        line
        for line in protected.splitlines()
        if line.startswith("| ") and not line.startswith(("| from |", "| --- |"))
    ]


def test_each_line_names_a_test() -> None:
    assert len(rows()) > RISKS
    assert [row for row in rows() if TEST.search(row) is None] == []


def test_each_test_exists() -> None:
    missing = []
    for path, name in TEST.findall(PAGE.read_text()):
        file = ROOT / path
        names = {one.name for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)}
        if name and name not in names:
            missing.append(f"{path}::{name}")

    assert missing == []


def test_each_risk_of_the_list_has_its_section_in_order() -> None:
    numbers = re.findall(r"^### (\d+)\. ", PAGE.read_text(), re.MULTILINE)

    assert numbers == [str(number) for number in range(1, RISKS + 1)]
