"""Our worker and TensorRT-LLM can be installed together: each common requirement has a version that suits both."""

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
"""The extras of a worker with TensorRT-LLM. The other engines' extras are for other environments."""


def ours() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]


def by_name(lines: Iterable[str]) -> dict[str, SpecifierSet]:
    """The requirements that apply without extras, by name."""
    found: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, lines):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            name = canonicalize_name(requirement.name)
            found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def clashes(some: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """The distributions without a version that suits both, and their combined specifiers."""
    left, right = by_name(some), by_name(others)
    both = {name: left[name] & right[name] for name in left.keys() & right.keys()}
    return {name: str(specifiers) for name, specifiers in both.items() if not has_version(specifiers)}


def has_version(specifiers: SpecifierSet) -> bool:
    """Whether any version matches. If one does, so does a version in the specifiers, or one just above or below."""
    named = [Version(specifier.version.removesuffix(".*")) for specifier in specifiers]
    near = [Version(f"{version}{suffix}") for version in named for suffix in (".post1", ".dev0", ".1")]
    return not named or any(specifiers.contains(version, prereleases=True) for version in [*named, *near])


def test_published_requirements_are_compatible_with_ours() -> None:
    assert by_name(REQUIREMENTS).keys() & by_name(ours()).keys() >= {"aiohttp", "grpcio", "protobuf", "tokenizers"}
    assert clashes(ours(), REQUIREMENTS) == {}


def test_requirements_of_the_installed_package_are_compatible_with_ours() -> None:
    try:
        theirs = requires("tensorrt_llm") or []
    except PackageNotFoundError:
        pytest.skip("TensorRT-LLM is not installed here, so its own requirements were not checked")

    assert clashes(ours(), theirs) == {}


def test_some_python_version_suits_both() -> None:
    specifiers = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])

    assert any(specifiers.contains(version) for version in PYTHONS)


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
def test_conflicting_requirements_are_found(one: str, other: str, is_clash: bool) -> None:
    assert bool(clashes([one], [other])) is is_clash
