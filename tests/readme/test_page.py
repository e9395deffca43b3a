"""No command of the README is left out, and what it names is there: targets of make, options, variables, files."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from services.cli import COMMANDS, cli, known_variables
from tests.clients import test_commands as clients
from tests.readme.page import BLOCK, ROOT, TEXT, blocks, command, commands, spans
from tests.readme.shell import Shell
from tests.readme.table import TRIED, Place

LANGUAGES = {"sh", "console", "python"}
"""Blocks in others have no test that would run them."""
DOCKERS_OWN = {"--profile"}


def test_each_command_is_tried() -> None:
    tried = [command(part) for part in TRIED] + [clients.command(*key) for key in clients.COMMANDS]

    assert [one for one in commands() if one not in tried] == []
    assert len(tried) == len(set(tried))
    assert {language for language, _ in blocks()} == LANGUAGES


@pytest.mark.parametrize(("part", "place"), TRIED.items(), ids=TRIED)
def test_it_is_tried_where_the_table_says(part: str, place: Place) -> None:
    assert (place.has or part) in (ROOT / place.file).read_text()


@pytest.mark.parametrize("words", [words for words in commands() if re.match(r"(\w+=\S+ )*make ", words)])
def test_make_has_the_target(words: str, tmp_path: Path) -> None:
    assert Shell(tmp_path).run(words.replace("make ", "make --dry-run ", 1), {})


def options(of: click.Command) -> Iterator[str]:
    """All options of a command and of those below it."""
    for parameter in of.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for one in of.commands.values() if isinstance(of, click.Group) else ():
        yield from options(one)


def test_each_option_is_one_of_a_command() -> None:
    context = click.Context(cli)
    known = {"--help", "--", *DOCKERS_OWN}
    for name in COMMANDS:
        known.update(options(cli.get_command(context, name) or cli))

    assert {span.split()[0] for span in spans() if span.startswith("--")} <= known


def test_each_variable_is_read() -> None:
    assert set(re.findall(r"\bDYN_\w+", TEXT)) <= known_variables()


def test_each_service_and_each_metric_has_that_name() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    named = [re.fullmatch(r"unbroken\.v1\.(\w+)(?:/(\w+))?", span) for span in spans()]
    metrics = [span for span in spans() if re.match(r"(dynamo|unbroken)_\w+$", span)]

    assert any(named)
    for service, call in (one.groups() for one in named if one is not None):
        assert f"service {service} {{" in protos
        assert call is None or f"rpc {call}(" in protos
    assert metrics
    assert [one for one in metrics if f"`{one}`" not in (ROOT / "METRICS.md").read_text()] == []


def test_each_link_leads_somewhere() -> None:
    anchors = {"#" + re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in headings(TEXT)}
    targets = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", TEXT))
    here = [target for target in targets if "://" not in target]

    assert [one for one in here if one.startswith("#") and one not in anchors] == []
    assert [one for one in here if not one.startswith("#") and not (ROOT / one.partition("#")[0]).exists()] == []


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
