"""A client is built once; a build that was interrupted spoils none after it."""

from pathlib import Path

import pytest

from tests.clients.support import toolchains
from tests.clients.support.toolchains import INFERENCE, Client

PROGRAM = "python"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(toolchains, "CACHE", tmp_path)
    return tmp_path


class Builds:
    """A build that leaves `half` behind before it fails or returns. found: what was there each time."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []
        self.fails = False

    def __call__(self, folder: Path) -> list[str]:
        self.found.append({str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()})
        (folder / "half").touch()
        if self.fails:
            raise KeyboardInterrupt
        return [str(folder / "client")]


SOURCES = {"client.py", "requirements.txt", f"proto/{INFERENCE}"}


def test_it_is_built_once_of_its_program_and_the_proto_file() -> None:
    builds = Builds()
    client = Client(PROGRAM, (), builds)

    commands = [client.command(), client.command()]

    assert builds.found == [SOURCES]
    assert commands[0] == commands[1]
    assert Path(commands[0][0]).parent.name.startswith(f"{PROGRAM}-")


def test_after_a_build_that_was_interrupted_it_is_built_from_the_start() -> None:
    builds = Builds()
    client = Client(PROGRAM, (), builds)
    builds.fails = True
    with pytest.raises(KeyboardInterrupt):
        client.command()
    builds.fails = False

    client.command()

    assert builds.found == [SOURCES, SOURCES]
