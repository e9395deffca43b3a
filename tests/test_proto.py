"""Within v1 the proto files only grow: `make lint` fails if a change breaks clients of the last release.

The check compares with the files recorded in `proto-released`, so it needs no git tag. Each test runs in a copy.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("Makefile", "pyproject.toml", "buf.yaml")
FOLDERS = ("proto", "proto-released")
MAKE_S_MAX = 60.0
FIELD = "  string model = 1;\n"
NEXT_VERSION = "0.99.0"


class Tree:
    """A copy of the files that the check reads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in FILES:
            shutil.copy(ROOT / name, folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, folder / name)

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace the first occurrence of `old` in a proto file."""
        path = self._folder / "proto" / "unbroken" / "v1" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    def begin_version(self, version: str) -> None:
        path = self._folder / "pyproject.toml"
        path.write_text(re.sub(r'^version = ".*"$', f'version = "{version}"', path.read_text(), flags=re.MULTILINE))

    def make(self, target: str) -> tuple[bool, str]:
        """Run a make target. Returns whether it succeeds, and its output."""
        command = ("make", "--old-file=install-dev", f"BIN={Path(sys.executable).parent}", target)
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, timeout=MAKE_S_MAX)
        return done.returncode == 0, done.stdout + done.stderr

    def recorded(self) -> list[str]:
        return [path.name for path in (self._folder / "proto-released").iterdir()]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_current_proto_files_are_compatible_with_the_last_release(tree: Tree) -> None:
    succeeds, printed = tree.make("lint-proto")

    assert succeeds, printed


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("inference.proto", FIELD, "  string model = 91;\n", id="number"),
        pytest.param("inference.proto", FIELD, "  string name = 1;\n", id="name"),
        pytest.param("inference.proto", FIELD, "  bytes model = 1;\n", id="type"),
        pytest.param("inference.proto", FIELD, "  reserved 1;\n", id="removed"),
        pytest.param("inference.proto", "rpc Cancel(", "rpc Cancel(stream ", id="method"),
        pytest.param("inference.proto", "FINISH_REASON_LENGTH", "FINISH_REASON_LIMIT", id="enum value"),
        pytest.param("admin.proto", FIELD, "  string model = 91;\n", id="admin"),
        pytest.param("registry.proto", "string address = 2;", "string address = 92;", id="registry"),
        pytest.param("worker.proto", "uint32 stream_id = 1;", "uint32 stream_id = 91;", id="number on a session"),
        pytest.param("worker.proto", "uint32 stream_id = 1;", "string stream_id = 1;", id="type on a session"),
    ],
)
def test_incompatible_change_fails_the_check(tree: Tree, name: str, old: str, new: str) -> None:
    tree.edit(name, old, new)

    succeeds, printed = tree.make("lint-proto")

    assert not succeeds
    assert re.search(rf"^proto/unbroken/v1/{name}:\d+:\d+:", printed, re.MULTILINE), printed


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param("inference.proto", FIELD, f"{FIELD}  // New.\n  string more = 91;\n", id="new field"),
        pytest.param("worker.proto", "uint32 stream_id = 1;", "uint32 stream = 1;", id="name on a session"),
    ],
)
def test_compatible_change_passes_the_check(tree: Tree, name: str, old: str, new: str) -> None:
    tree.edit(name, old, new)

    succeeds, printed = tree.make("lint-proto")

    assert succeeds, printed


def test_version_without_recorded_proto_files_fails_the_check(tree: Tree) -> None:
    tree.begin_version(NEXT_VERSION)

    succeeds, printed = tree.make("lint-proto")

    assert not succeeds
    assert f"version {NEXT_VERSION} has no record of its proto files: make record-proto" in printed


def test_record_replaces_the_last_one_and_becomes_binding(tree: Tree) -> None:
    """From then on the new fields may not be broken either."""
    tree.edit("inference.proto", FIELD, f"{FIELD}  // New.\n  string more = 91;\n")
    tree.begin_version(NEXT_VERSION)

    succeeds, printed = tree.make("record-proto")

    assert succeeds, printed
    assert tree.recorded() == [NEXT_VERSION]
    assert tree.make("lint-proto")[0]
    tree.edit("inference.proto", "string more = 91;", "string more = 92;")
    assert not tree.make("lint-proto")[0]


def test_incompatible_change_is_not_recorded(tree: Tree) -> None:
    before = tree.recorded()
    tree.edit("inference.proto", FIELD, "  string model = 91;\n")
    tree.begin_version(NEXT_VERSION)

    succeeds, _ = tree.make("record-proto")

    assert not succeeds
    assert tree.recorded() == before
