"""Reads names and signatures from a package's source files, without importing it or its native libraries."""

import ast
from dataclasses import dataclass, field
from pathlib import Path

from tests.contracts.manifest import ClassUse

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(slots=True)
class ClassFacts:
    """The contents of a class. `fields`: annotated in the body or assigned to `self`. `functions`: by name."""

    fields: set[str] = field(default_factory=set)
    functions: dict[str, Function] = field(default_factory=dict)


def read_class(path: Path, name: str) -> ClassFacts | None:
    """Read a class, including its base classes in the same file; None if there is no such class."""
    classes = {node.name: node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return None
    facts, pending = ClassFacts(), [name]
    while pending:
        node = classes.pop(pending.pop(0), None)
        if node is not None:
            _add(facts, node)
            pending += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return facts


def _add(facts: ClassFacts, node: ast.ClassDef) -> None:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            facts.fields.add(statement.target.id)
        elif isinstance(statement, Function):
            facts.functions.setdefault(statement.name, statement)
            facts.fields |= _set_on_self(statement)


def _set_on_self(function: Function) -> set[str]:
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def parameters(function: Function) -> set[str]:
    """The names of all parameters of a function."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return {argument.arg for argument in named if argument is not None}


def exported(path: Path) -> set[str]:
    """The names that a package's `__init__` imports, defines, or mentions in a string, as a lazy import does."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing_from(package: Path, use: ClassUse) -> list[str]:
    """Describe the parts of `use` that the package lacks."""
    where = f"{use.module}: {use.name}"
    path = package / use.module
    facts = read_class(path, use.name) if path.is_file() else None
    if facts is None:
        return [where]
    is_async = {name: isinstance(function, ast.AsyncFunctionDef) for name, function in facts.functions.items()}
    missing = [f"{where}.{name}" for name in use.fields if name not in facts.fields]
    missing += [f"def {where}.{name}" for name in use.methods if is_async.get(name) is not False]
    missing += [f"async def {where}.{name}" for name in use.coroutines if is_async.get(name) is not True]
    for name, keywords in use.calls:
        function = facts.functions.get(name)
        known = set() if function is None else parameters(function)
        missing += [f"{where}.{name}({keyword}=)" for keyword in keywords if keyword not in known]
    return missing
