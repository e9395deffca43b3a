"""The tables of the pages that the code knows: options, failures, values of bounds.

`python -m tests.docs.tables`, which is `make pages`, writes them; test_tables.py fails while a page has another table.
"""

import importlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from services.cli import COMMANDS, cli
from services.cli.options import Integer, Number
from services.core.errors import TRAITS, Reason
from services.frontend.api.openai.other_fields import (
    IN_CHAT,
    IN_COMPLETION,
    IN_JSON_SCHEMA,
    IN_MESSAGE,
    IN_PART,
    IN_RESPONSE_FORMAT,
    IN_STREAM_OPTIONS,
    IN_STRUCTURED_OUTPUTS,
    Other,
)
from tests.docs.pages import PAGES, ROOT

BOUNDS = "docs/bounds.md"
BLOCK = re.compile(r"(<!-- begin: ([^(]+) \(written by `make pages`\) -->\n).*?(<!-- end -->)", re.DOTALL)
ROW = re.compile(r"^\| ([^|]+) \| `([^`|]+)` \|([^|]*)\| `([^`|]+)` \|$", re.MULTILINE)
"""A row of the bounds: what, the bound's name, its value, the file."""
SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
UNITS = (
    # How a name or an option says its unit, the first that fits, and how a value is written.
    (r"_PER_S_MAX$", "{} per s"),
    (r"_S$|_S_|_s$|_s_|-timeout$|-wait$|-lease$|-keepalive$|-grace-max$", "{} s"),
    (r"-ms$|_MS_MAX$", "{} ms"),
    (r"-mb$", "{} MiB"),
)
OBJECTS = {
    "messages[]": IN_MESSAGE,
    "messages[].content[]": IN_PART,
    "stream_options": IN_STREAM_OPTIONS,
    "response_format": IN_RESPONSE_FORMAT,
    "response_format.json_schema": IN_JSON_SCHEMA,
    "structured_outputs": IN_STRUCTURED_OUTPUTS,
}
ONCE = {Reason.ENGINE_ERROR: "once, before the first token"}
"""What `migration/policy.py` decides rather than the table of reasons."""


def rewritten(text: str) -> str:
    """A page with each table as the code has it."""

    def replace(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found[2]]()}\n{found[3]}"

    return ROW.sub(_bound, BLOCK.sub(replace, text))


# Options


def command_named(name: str) -> click.Command:
    """`models pull` is the command below the group `models`."""
    context = click.Context(cli)
    command: click.Command | None = cli
    for word in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(context, word)
    assert command is not None, name
    return command


def names_of_commands() -> list[str]:
    """Every command, those below groups included."""
    found = []
    for name in COMMANDS:
        command = command_named(name)
        inner = command.commands if isinstance(command, click.Group) else {}
        found += [f"{name} {one}" for one in inner] or [name]
    return found


def options_of(command: click.Command) -> Iterator[click.Option]:
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden and parameter.name != "help":
            yield parameter


def options() -> str:
    """A section for each command that has options of its own."""
    return "\n".join(filter(None, (_section(name) for name in names_of_commands())))


def _section(name: str) -> str:
    command = command_named(name)
    rows = [
        f"| `{option.opts[0]}` | {_values(option)} | {_default(option)} | {_variables(option)} | {_cell(option.help)} |"
        for option in options_of(command)
    ]
    arguments = [one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)]
    if not rows:
        return ""
    head = f"## {' '.join(['unbroken', name, *arguments])}"
    return "\n".join([head, "", "| option | value | default | variable | meaning |", "| --- " * 5 + "|", *rows, ""])


def _values(option: click.Option) -> str:
    if option.is_flag:
        return ""
    kind = option.type
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if isinstance(kind, Integer | Number):
        return f"{_kind(kind)}, {_range(kind)}"
    return _cell(_kind(kind))


def _kind(kind: click.ParamType[Any]) -> str:
    return {"integer range": "integer", "float range": "number"}.get(kind.name, kind.name)


def _range(kind: Integer | Number) -> str:
    least, most = (f"{bound:.10g}" if isinstance(bound, float) else str(bound) for bound in (kind.least, kind.most))
    return f"above {least}, up to {most}" if kind.min_open else f"{least} to {most}"


def _default(option: click.Option) -> str:
    default = option.default
    if isinstance(option.show_default, str):
        return option.show_default
    is_unset = default is None or "UNSET" in repr(default) or default in ("", ()) or option.is_flag or callable(default)
    return "" if is_unset or option.show_default is False else f"`{default}`"


def _variables(option: click.Option) -> str:
    variables = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    return ", ".join(f"`{variable}`" for variable in variables)


def _cell(text: str | None) -> str:
    """Text as a cell of a table has it: on one line, where `*` and `|` mean something."""
    return re.sub(r"([|*])", r"\\\1", " ".join((text or "").split()))


# Failures


def failures_for_clients() -> str:
    """One row for each reason: what a client sees and does."""
    rows = []
    for reason, traits in TRAITS.items():
        again = "yes" if traits.retryable else "no"
        openai = f"`{traits.openai_code}`" if traits.openai_code else ""
        rows.append(f"| {reason} | {traits.http} | {traits.grpc.name} | {again} | {openai} | {_cell(traits.hint)} |")
    return "\n".join(["| reason | HTTP | gRPC | retryable | OpenAI's code | hint |", "| --- " * 6 + "|", *rows])


def failures_inside() -> str:
    """One row for all reasons that are treated alike: what the frontend does."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for reason, traits in TRAITS.items():
        moves = ONCE.get(reason, "yes" if traits.migrates else "no")
        counts = "" if moves == "no" else "no" if traits.free else "yes"
        blames = "yes" if traits.blames_worker else "no"
        rows.setdefault((traits.grpc.name, str(traits.http), moves, counts, blames), []).append(reason)
    lines = [f"| {', '.join(reasons)} | {' | '.join(cells)} |" for cells, reasons in rows.items()]
    head = "| reason | gRPC | HTTP | continues elsewhere | counts as a move | quarantines the worker |"
    return "\n".join([head, "| --- " * 6 + "|", *lines])


# Bounds


def _bound(found: re.Match[str]) -> str:
    what, name, _, file = found.groups()
    return f"| {what} | `{name}` | {written(name, value_of(name, file))} | `{file}` |"


def value_of(name: str, file: str) -> Any:
    """A constant of a module, the default of a field of its configuration, or that of a command's option."""
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    if name.startswith("--"):
        (found,) = [option for option in options_of(module.command) if name in option.opts]
        return found.default
    if name.isupper():
        return getattr(module, name)
    every = [one for one in vars(module).values() if is_dataclass(one) and one.__module__ == module.__name__]
    (value,) = [field.default for one in every for field in fields(one) if field.name == name]
    assert value is not MISSING, f"{name} in {file} has no default"
    return value


def written(name: str, value: Any) -> str:
    """A value with its unit."""
    if value is None or "UNSET" in repr(value):
        return "–"
    if re.search(r"(?i:bytes)(_(?i:max))?$|buffer-max", name):
        size, unit = next((size, unit) for size, unit in SIZES if value % size == 0)
        return f"{value // size:,} {unit}"
    unit = next((unit for form, unit in UNITS if re.search(form, name)), "{}")
    return unit.format(f"{int(value):,}" if value == int(value) else f"{value:g}")


def rows_without_a_bound() -> list[str]:
    """The rows of the page whose name is not, or no longer, in their file."""
    lost = []
    for _, name, _, file in ROW.findall((ROOT / BOUNDS).read_text()):
        try:
            value_of(name, file)
        except (AssertionError, AttributeError, ImportError, ValueError):
            lost.append(f"{name} is not in {file}")
    return lost


# Request fields


def other_fields() -> str:
    """One row for each field of a body that is not honoured."""
    rows = []
    for name in sorted({*IN_CHAT, *IN_COMPLETION}):
        chat, completion = (_outcome(others.get(name)) for others in (IN_CHAT, IN_COMPLETION))
        rows.append(f"| `{name}` | {chat if chat == completion else f'chats: {chat}; completions: {completion}'} |")
    return "\n".join(["| field | what happens |", "| --- " * 2 + "|", *rows])


def other_fields_of_objects() -> str:
    """One row for each field of an object in a body that is not honoured."""
    rows = [
        f"| `{path}.{name}` | {_outcome(other)} |"
        for path, others in OBJECTS.items()
        for name, other in sorted(others.items())
    ]
    return "\n".join(["| field | what happens |", "| --- " * 2 + "|", *rows])


def _outcome(other: Other | None) -> str:
    if other is None:
        return "honoured"
    if other.has_no_effect:
        return "no effect"
    if other.detail_of:
        return f"no effect; refused with {', '.join(f'`{name}`' for name in other.detail_of)}"
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in other.neutral)
    if other.neutral_like:
        neutral += f" or the value of `{other.neutral_like}`"
    unless = f"refused unless {neutral}" if neutral else "refused"
    return f"{unless}; use {_cell(other.use)}" if other.use else unless


TABLES: dict[str, Callable[[], str]] = {
    "options": options,
    "failures for clients": failures_for_clients,
    "failures": failures_inside,
    "other fields": other_fields,
    "other fields of objects": other_fields_of_objects,
}


def write(pages: list[Path]) -> None:
    for page in pages:
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            page.write_text(after)
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    if lost := rows_without_a_bound():
        raise SystemExit("\n".join([f"error: correct these rows of {BOUNDS}:", *lost]))
    write(PAGES)
