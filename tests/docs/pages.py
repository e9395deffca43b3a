"""The pages of the repository and what they name: commands, links, spans of code.

A command is a line of a shell block, what follows a prompt in a console block, a whole program, or a span of code that
begins with a program's name.
"""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
DESIGN = ROOT / "DESIGN.md"
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [README, DESIGN, *DOCS]
"""CHANGELOG.md is not among them: what it names belongs to the version that it describes."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
SHOWN = {"js", "mermaid", "python", "text", "toml"}
"""Languages of blocks that are read rather than run, but for `python` and `js`, which are programs."""
PROGRAMS = (
    ".",
    "buf",
    "curl",
    "docker",
    "go",
    "grpcurl",
    "kill",
    "make",
    "mvn",
    "node",
    "npm",
    "pip",
    "protoc",
    "python",
    "ulimit",
    "unbroken",
)
"""A span is a command if it has two words or more, and the first is one of these or a program's path."""


def text_of(page: str) -> str:
    """The text of a page, by its path from the root of the repository."""
    return (ROOT / page).read_text()


def blocks_in(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return BLOCK.findall(text)


def blocks() -> list[tuple[str, str]]:
    """The blocks of all pages."""
    return [block for page in PAGES for block in blocks_in(page.read_text())]


def spans_in(text: str) -> list[str]:
    """The spans of code outside blocks, each once, on one line."""
    found = SPAN.findall(BLOCK.sub("", text))
    return list(dict.fromkeys(" ".join(span.split()) for span in found))


def spans() -> list[str]:
    """The spans of code of all pages, each once."""
    return list(dict.fromkeys(span for page in PAGES for span in spans_in(page.read_text())))


def links_in(text: str) -> list[str]:
    """The targets of links outside blocks."""
    return LINK.findall(BLOCK.sub("", text))


def anchors_in(text: str) -> set[str]:
    """The anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def is_command(span: str) -> bool:
    words = [word for word in span.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and (words[0] in PROGRAMS or "/bin/" in words[0])


def commands() -> list[str]:
    """The commands of all pages, each once."""
    found: list[str] = []
    for language, block in blocks():
        match language:
            case "sh":
                found += split(block)
            case "console":
                found += [split(rest)[0] for rest in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
            case "python":
                found.append(block)
    return list(dict.fromkeys([*found, *filter(is_command, spans())]))


def split(block: str) -> list[str]:
    """The commands of a shell block, without comments behind them."""
    found, lines = [], ""
    for line in block.splitlines(keepends=True):
        lines += line
        if is_whole(lines):
            found.append(re.sub(r" +# .*$", "", lines.strip()))
            lines = ""
    assert not lines, f"no end: {lines}"
    return [one for one in found if one]


def is_whole(lines: str) -> bool:
    """Whether a shell would run it rather than ask for more."""
    try:
        shlex.split(lines, comments=True)
    except ValueError:  # A quotation has no end yet.
        return False
    return not lines.endswith("\\\n")


def command(part: str) -> str:
    """The command that is `part`, or else the only one that contains it."""
    every = commands()
    found = [part] if part in every else [one for one in every if part in one]
    assert len(found) == 1, f"{part!r} is in {len(found)} commands of the pages"
    return found[0]
