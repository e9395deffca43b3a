"""The tables of the pages are those of the code: options, failures, and the value of each bound.

`make pages` writes them again. What a table says beside that, such as what a bound is for, is written by hand.
"""

import re
from pathlib import Path

import click
import pytest

from services.core.errors import TRAITS
from tests.docs.pages import DESIGN, PAGES, ROOT
from tests.docs.tables import (
    BLOCK,
    BOUNDS,
    ROW,
    TABLES,
    command_named,
    names_of_commands,
    rewritten,
    rows_without_a_bound,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_table_is_as_the_code_has_it(page: Path) -> None:
    """Otherwise run `make pages`."""
    assert page.read_text() == rewritten(page.read_text()), "run `make pages`"


def test_each_table_stands_in_some_page() -> None:
    found = [name for page in PAGES for _, name, _ in BLOCK.findall(page.read_text())]

    assert sorted(found) == sorted(TABLES)


def test_each_bound_of_the_page_is_in_its_file() -> None:
    assert rows_without_a_bound() == [], f"correct these rows of {BOUNDS}"


def test_each_row_of_the_bounds_has_a_value() -> None:
    lines = [line for line in (ROOT / BOUNDS).read_text().splitlines() if line.startswith("| ") and ".py" in line]

    assert lines
    assert [line for line in lines if ROW.fullmatch(line) is None or "|  |" in line] == []


def test_each_reason_is_in_the_table_of_failures() -> None:
    (table,) = [found[0] for found in BLOCK.finditer(DESIGN.read_text()) if found[2] == "failures"]
    reasons = [reason for cell in re.findall(r"^\| ([A-Z_, ]+) \|", table, re.MULTILINE) for reason in cell.split(", ")]

    assert sorted(reasons) == sorted(TRAITS)


def test_each_option_is_in_the_page_of_options() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    missing = []
    for name in names_of_commands():
        section = page.partition(f"\n## unbroken {name}")[2].partition("\n## ")[0]
        for one in command_named(name).params:
            is_shown = isinstance(one, click.Option) and not one.hidden and one.name != "help"
            if is_shown and f"| `{one.opts[0]}` |" not in section:
                missing.append((name, one.opts[0]))

    assert missing == []


NO_BOUNDS = {
    # Ranges of a value that a client, an operator or a platform sets; nothing waits or grows with them.
    "services/core/errors.py": {"JITTER_MAX"},
    "services/core/validation.py": {"COUNT_MAX", "LOGIT_BIAS_MAX", "SEED_MAX"},
    "services/frontend/routing/thresholds.py": {"TOKENS_MAX"},
    "services/frontend/session/reader.py": {"TOKENS_SHARE_MAX"},
    "services/frontend/session/writer.py": {"TIMEOUT_S_MAX"},
    "services/cli/options.py": {"INTEGER_MAX"},
    "services/runtime/address.py": {"PORT_MAX"},
    "services/runtime/loop.py": {"EXACT_S_MAX"},
    # The terminal's own conversation.
    "services/cli/chat/client.py": {"EVENT_BYTES_MAX"},
}
"""Constants that are named like a bound and are none of the plane's."""


def test_each_constant_that_is_named_like_a_bound_is_in_the_page() -> None:
    listed = {(name, file) for _, name, _, file in ROW.findall((ROOT / BOUNDS).read_text())}
    missing = []
    for path in sorted((ROOT / "services").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        named = re.findall(r"^([A-Z][A-Z_]*_(?:MAX|KEPT))\b.* = ", path.read_text(), re.MULTILINE)
        missing += [
            (name, file) for name in named if (name, file) not in listed and name not in NO_BOUNDS.get(file, ())
        ]

    assert missing == [], "add them to docs/bounds.md and run `make pages`"
