"""The structure of the code: imports point down, rooms and modules form no cycle, and files stay small.

A room is a folder of modules. Its level says which rooms it may import: those of lower levels, and its own.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SERVICES = ROOT / "services"
MODULES_MAX = 12
FUNCTION_LINES_MAX = 60
CLASS_LINES_MAX = 250

LEVELS = (
    {"services.stubs"},
    {"services.runtime"},
    {"services.core"},
    {"services.isolation", "services.access", "services.tls"},
    {"services.rpc", "services.models"},
    {"services.http"},
    {"services.discovery", "services.registry"},
    {"services.frontend", "services.worker", "services.cluster"},
    {"services.cli"},
)
"""Top-level rooms, lowest first. Rooms on one level do not import each other."""

CROWDED: Mapping[str, int] = {}
"""Folders with more than MODULES_MAX modules, and how many they have. This list may only shrink."""

LONG: Mapping[str, int] = {}
"""Functions and classes above their limit, by `path:name`, and their lines. This list may only shrink."""

Imports = Mapping[str, frozenset[str]]


def python_files(folder: str) -> Iterator[Path]:
    """The project's own modules below a folder, without generated and vendored ones."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).parts
        if not any(part.startswith(".") or part in {"node_modules", "stubs"} for part in parts):
            yield path


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def imports() -> Imports:
    """Module → modules of this project that it imports, also inside functions."""
    names = {module_name(path): path for path in python_files("services")}
    return {name: frozenset(_imported(path, names)) for name, path in names.items()}


def _imported(path: Path, names: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            candidates = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (
                one if one in names else node.module for one in candidates if node.module.startswith("services")
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("services"))


def level_of(module: str) -> int | None:
    """The level of a module's top-level room; None for the package itself and its `__main__`."""
    room = ".".join(module.split(".")[:2])
    return next((level for level, rooms in enumerate(LEVELS) if room in rooms), None)


def arrows_up(arrows: Imports) -> list[str]:
    """Imports of another top-level room that is not on a lower level."""
    found = []
    for module, imported in arrows.items():
        for other in imported:
            here, there = level_of(module), level_of(other)
            is_same_room = module.split(".")[:2] == other.split(".")[:2]
            if here is not None and there is not None and not is_same_room and there >= here:
                found.append(f"{module} imports {other}")
    return sorted(found)


def cycle_of(arrows: Mapping[str, Iterable[str]]) -> list[str]:
    """The nodes of a cycle; empty if there is none."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room_of(module: str) -> str:
    """The folder that a module stands in."""
    is_folder = (ROOT / Path(*module.split("."))).is_dir()
    return module if is_folder else module.rpartition(".")[0]


def arrows_between_siblings(parent: str) -> Mapping[str, set[str]]:
    """Arrows between the direct sub-rooms of a room; modules of the room itself are left out."""
    depth = len(parent.split("."))
    arrows: dict[str, set[str]] = {}
    for module, imported in imports().items():
        for other in imported:
            pair = [".".join(name.split(".")[: depth + 1]) for name in (module, other)]
            are_rooms = all(name.startswith(f"{parent}.") and room_of(name) == name for name in pair)
            if are_rooms and pair[0] != pair[1]:
                arrows.setdefault(pair[0], set()).add(pair[1])
    return arrows


def test_imports_point_to_lower_levels_only() -> None:
    assert arrows_up(imports()) == []


def test_an_import_turned_round_is_found() -> None:
    module, imported = "services.frontend.pipeline", "services.core.gate"
    assert imported in imports()[module]

    turned = {imported: frozenset({module})}

    assert arrows_up(turned) == [f"{imported} imports {module}"]


def test_every_top_level_room_has_a_level() -> None:
    rooms = {f"services.{path.name}" for path in SERVICES.iterdir() if (path / "__init__.py").exists()}

    assert rooms == set().union(*LEVELS)


def test_modules_import_each_other_in_no_cycle() -> None:
    inside = {name: {one for one in imported if one in imports()} for name, imported in imports().items()}
    without_packages = {
        name: {one for one in imported if not name.startswith(f"{one}.")} for name, imported in inside.items()
    }

    assert cycle_of(without_packages) == []


@pytest.mark.parametrize("parent", ["services", "services.frontend", "services.worker", "services.frontend.api"])
def test_rooms_import_each_other_in_no_cycle(parent: str) -> None:
    assert cycle_of(arrows_between_siblings(parent)) == []


def test_the_pair_of_process_keepers_is_independent() -> None:
    """`cluster` and `frontend.processes` share runtime.supervision, and nothing of each other."""
    for here, there in (("services.cluster", "services.frontend"), ("services.frontend", "services.cluster")):
        users = [name for name, imported in imports().items() if name.startswith(here) and _uses(imported, there)]
        assert users == []


def _uses(imported: Iterable[str], room: str) -> bool:
    return any(one == room or one.startswith(f"{room}.") for one in imported)


@pytest.mark.parametrize("tree", ["services", "tests", "bench", "clients", "simulation"])
def test_no_folder_is_crowded(tree: str) -> None:
    counts: dict[str, int] = {}
    for path in python_files(tree):
        folder = str(path.parent.relative_to(ROOT))
        if path.name not in {"__init__.py", "conftest.py"} and "tests/fakes/tensorrt_llm" not in folder:
            counts[folder] = counts.get(folder, 0) + 1

    crowded = {folder: count for folder, count in counts.items() if count > MODULES_MAX}

    assert crowded == {folder: count for folder, count in CROWDED.items() if folder.split("/")[0] == tree}


def test_functions_and_classes_are_short() -> None:
    long = {}
    for path in (*python_files("services"), *python_files("clients"), *python_files("simulation")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                limit = CLASS_LINES_MAX if isinstance(node, ast.ClassDef) else FUNCTION_LINES_MAX
                if lines > limit:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = lines

    assert {name for name in long if name not in LONG} == set()
    assert {name: lines for name, lines in LONG.items() if long.get(name, 0) < lines} == {}, "shorten the list"
