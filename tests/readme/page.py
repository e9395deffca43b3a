"""The commands of README.md, each as it stands there."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
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
"""A span in the text is a command if it has two words or more, and the first is one of these or a program's path."""


def blocks() -> list[tuple[str, str]]:
    """The language and the text of each block."""
    return BLOCK.findall(TEXT)


def spans() -> list[str]:
    """What stands in backticks in the text, each once, on one line."""
    found = SPAN.findall(BLOCK.sub("", TEXT))
    return list(dict.fromkeys(" ".join(span.split()) for span in found))


def is_command(span: str) -> bool:
    words = [word for word in span.split() if not re.match(r"[A-Z_]+=", word)]
    return len(words) > 1 and (words[0] in PROGRAMS or "/bin/" in words[0])


def commands() -> list[str]:
    """All of them, each once: lines of shell blocks, what stands behind a prompt, whole programs, spans in the text."""
    found: list[str] = []
    for language, block in blocks():
        match language:
            case "sh":
                found += split(block)
            case "console":
                found += [split(rest)[0] for rest in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
            case _:
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
    """The one that is this, or else the only one that has this in it."""
    every = commands()
    found = [part] if part in every else [one for one in every if part in one]
    assert len(found) == 1, f"{part!r} is in {len(found)} commands of the README"
    return found[0]
