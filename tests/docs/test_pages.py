"""No command of the pages is left out, and what they name exists: targets of make, options, variables, files, links."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from services.cli import COMMANDS, cli, known_variables
from tests.clients import test_commands as clients
from tests.docs.commands.shell import Shell
from tests.docs.commands.table import TRIED, Place
from tests.docs.pages import (
    DOCS,
    PAGES,
    README,
    ROOT,
    SHOWN,
    anchors_in,
    blocks,
    command,
    commands,
    links_in,
    spans,
    spans_in,
)

RUN = {"sh", "console"}
DOCKERS_OWN = {"--profile"}
CHANGELOG = ROOT / "CHANGELOG.md"
DECISIONS = ROOT / "docs" / "decisions"
PARTS = ("bench", "docs", "proto", "proto-released", "services", "tests")
"""Folders of the repository: a span that begins with one names a file or a folder."""


def test_each_command_is_tried() -> None:
    tried = [command(part) for part in TRIED] + [clients.command(*key) for key in clients.COMMANDS]

    assert [one for one in commands() if one not in tried] == []
    assert len(tried) == len(set(tried))


def test_each_block_has_a_language_that_is_run_or_shown() -> None:
    assert {language for language, _ in blocks()} <= RUN | SHOWN


@pytest.mark.parametrize(("part", "place"), TRIED.items(), ids=TRIED)
def test_a_command_is_tried_where_the_table_says(part: str, place: Place) -> None:
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_variable_is_read(page: Path) -> None:
    foreign = {"DYN_FRONTEND_SERVICE_HOST", "DYN_NAMESPACE", "DYN_STALL"}  # Examples of what is ignored.
    foreign |= {"DYN_STALL_MSS", "DYN_REQUEST_TIMEOUT_SEC"}  # Examples of what is refused.
    assert set(re.findall(r"\bDYN_\w+", page.read_text())) - foreign <= known_variables()


def test_each_service_and_each_metric_has_that_name() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "proto").rglob("*.proto"))
    named = [re.fullmatch(r"unbroken\.v1\.(\w+)(?:/(\w+))?", span) for span in spans()]
    metrics = [span for span in spans() if re.match(r"(dynamo|unbroken)_\w+$", span) and span != "dynamo_frontend"]
    documented = (ROOT / "docs" / "metrics.md").read_text()

    assert any(named)
    for service, call in (one.groups() for one in named if one is not None):
        assert f"service {service} {{" in protos
        assert call is None or f"rpc {call}(" in protos
    assert metrics
    assert [one for one in metrics if f"\n| `{one}`" not in documented] == []


@pytest.mark.parametrize("page", [*PAGES, CHANGELOG], ids=lambda page: page.name)
def test_each_link_leads_somewhere(page: Path) -> None:
    targets = [target for target in links_in(page.read_text()) if "://" not in target]

    assert [target for target in targets if not is_there(page, target)] == []


def is_there(page: Path, target: str) -> bool:
    """Whether a relative link has its file and, if it names one of a page, its heading."""
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return file.exists() and (not anchor or anchor in anchors_in(file.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_path_in_the_text_exists(page: Path) -> None:
    named = [span.partition("::")[0] for span in spans_in(page.read_text()) if re.match(rf"({'|'.join(PARTS)})/", span)]

    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_named_beside_a_link_to_their_folder_exist() -> None:
    """In the README's table of what is where, which names files of a folder without repeating it."""
    lost: list[str] = []
    folders: list[Path] = []
    for line in README.read_text().partition("\n## Where is what\n")[2].splitlines():
        folders = [ROOT / target for target in links_in(line) if (ROOT / target).is_dir()] or folders
        lost += [name for name in re.findall(r"`(\w+\.py)`", line) if not any((one / name).exists() for one in folders)]

    assert lost == []


def test_each_page_is_reached_from_the_readme() -> None:
    reached, ahead = {README}, [README]
    while ahead:
        page = ahead.pop()
        for target in links_in(page.read_text()):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file not in reached and file.exists():
                reached.add(file)
                ahead.append(file)

    assert set(DOCS) - reached == set()


def test_the_readme_links_each_page_but_the_single_decisions() -> None:
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in links_in(README.read_text())}

    assert {page for page in DOCS if page.parent != DECISIONS} <= linked


@pytest.mark.parametrize("record", sorted(DECISIONS.glob("0*.md")), ids=lambda record: record.name)
def test_a_decision_has_its_parts_and_is_in_the_index(record: Path) -> None:
    headings = re.findall(r"^## (.*)$", record.read_text(), re.MULTILINE)
    (title,) = re.findall(r"^# (.*)$", record.read_text(), re.MULTILINE)

    assert headings in (["Context", "Decision", "Cost"], ["Context", "Decision", "Cost", "Figures"])
    assert f"| {record.name[:4]} | [{title}]({record.name}) |" in (DECISIONS / "README.md").read_text()


@pytest.mark.parametrize("record", sorted(DECISIONS.glob("0*.md")), ids=lambda record: record.name)
def test_a_figure_that_a_decision_names_is_in_the_results(record: Path) -> None:
    """Quoted names in the section of figures are rows of the pages of results that it links."""
    section = record.read_text().partition("\n## Figures\n")[2]
    results = "".join((record.parent / target).read_text() for target in links_in(section) if "/results/" in target)

    assert [name for name in re.findall(r'"([^"]+)"', section) if f"| {name}" not in results] == []
