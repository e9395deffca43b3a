"""DESIGN.md says what becomes of each thing known to go wrong with TensorRT-LLM, and names tests that there are."""

import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
COUNT = 20


def rows() -> dict[int, str]:
    """What the table says of each, by number."""
    design = (ROOT / "DESIGN.md").read_text()
    section = re.split(r"^## ", design.partition("\n## TensorRT-LLM\n")[2], flags=re.MULTILINE)[0]
    return {int(number): said for number, said in re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", section, re.MULTILINE)}


def test_the_table_has_all_of_them() -> None:
    assert list(rows()) == list(range(1, COUNT + 1))


def test_each_is_shown_by_tests_that_there_are_or_has_its_reason() -> None:
    without = []
    for number, said in rows().items():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", said)
        if not named:
            without.append(number)
        for file, name in named:
            path = ROOT / file if file.startswith("tests/") else HERE / file
            assert f"def {name}(" in path.read_text(), f"{number}: there is no {file}::{name}"

    assert without == [20], "a GPU's alone"
