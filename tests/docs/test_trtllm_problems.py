"""docs/gpus.md says what becomes of each known problem of TensorRT-LLM, and the tests that it names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE_TESTS = ROOT / "tests" / "worker" / "engines" / "trtllm"
COUNT = 20


def rows() -> dict[int, str]:
    """What the table says about each problem, by its number."""
    page = (ROOT / "docs" / "gpus.md").read_text()
    section = re.split(r"^## ", page.partition("\n## Known problems of TensorRT-LLM\n")[2], flags=re.MULTILINE)[0]
    return {int(number): said for number, said in re.findall(r"^\| (\d+) \| [^|]+ \| (.+) \|$", section, re.MULTILINE)}


def test_the_table_has_all_problems() -> None:
    assert list(rows()) == list(range(1, COUNT + 1))


def test_each_problem_is_shown_by_existing_tests_or_has_its_reason() -> None:
    without = []
    for number, said in rows().items():
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", said)
        if not named:
            without.append(number)
        for file, name in named:
            path = ROOT / file if file.startswith("tests/") else ENGINE_TESTS / file
            assert f"def {name}(" in path.read_text(), f"{number}: {file}::{name} does not exist"

    assert without == [20], "only a GPU can tell"
