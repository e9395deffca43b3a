"""Our worker and TensorRT-LLM can live in one environment: of whatever both need, some version suits both."""

import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.contracts.manifest import PYTHONS, REQUIREMENTS

ROOT = Path(__file__).resolve().parent.parent.parent
EXTRAS = ("huggingface",)
"""What a worker with TensorRT-LLM needs besides our core. The other engines' extras are for other environments."""


def ours() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]


def by_name(lines: Iterable[str]) -> dict[str, SpecifierSet]:
    """Those that hold without extras."""
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def clashes(some: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """The distributions of which no version suits both, and what is asked of them."""
    left, right = by_name(some), by_name(others)
    both = {name: left[name] & right[name] for name in left.keys() & right.keys()}
    return {name: str(asked) for name, asked in both.items() if not has_version(asked)}


def has_version(asked: SpecifierSet) -> bool:
    """If any version suits, then one that is named or one just above or below."""
    named = [Version(specifier.version.removesuffix(".*")) for specifier in asked]
    near = [Version(f"{version}{suffix}") for version in named for suffix in (".post1", ".dev0", ".1")]
    return not named or any(asked.contains(version, prereleases=True) for version in [*named, *near])


def test_requirements_as_published_suit_ours() -> None:
    assert by_name(REQUIREMENTS).keys() & by_name(ours()).keys() >= {"aiohttp", "grpcio", "protobuf", "tokenizers"}
    assert clashes(ours(), REQUIREMENTS) == {}


def test_requirements_of_the_installed_package_suit_ours() -> None:
    try:
        theirs = requires("tensorrt_llm") or []
    except PackageNotFoundError:
        pytest.skip("TensorRT-LLM is not installed here, so its own requirements were not checked")

    assert clashes(ours(), theirs) == {}


def test_there_is_a_python_for_both() -> None:
    asked = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])

    assert any(asked.contains(version) for version in PYTHONS)


@pytest.mark.parametrize(
    ("one", "other", "is_clash"),
    [
        ("protobuf<6,>=5", "protobuf>=6.33.5", True),
        ("protobuf>=6.33.5,<8", "protobuf>=6.33.5", False),
        ("aiohttp>3.14", "aiohttp<3.15", False),
        ("numpy>=2", "NumPy<2", True),
        ("click", "click>=8", False),
    ],
)
def test_a_clash_would_be_found(one: str, other: str, is_clash: bool) -> None:
    assert bool(clashes([one], [other])) is is_clash
