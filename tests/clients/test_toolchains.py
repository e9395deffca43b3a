"""A client is built once; neither an interrupted build nor an interpreter that is gone spoils the next run."""

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
    """A build that leaves the file `half` before it fails or returns. `found`: the files at the start of each build."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []
        self.fails = False

    def __call__(self, folder: Path) -> list[str]:
        self.found.append({str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()})
        (folder / "half").touch()
        if self.fails:
            raise KeyboardInterrupt
        (folder / "client").touch(mode=0o755)
        return [str(folder / "client")]


SOURCES = {"client.py", "resume.py", "requirements.txt", f"proto/{INFERENCE}"}


def test_client_is_built_once_from_its_program_and_the_proto_file() -> None:
    builds = Builds()
    client = Client(PROGRAM, (), builds)

    commands = [client.command(), client.command()]

    assert builds.found == [SOURCES]
    assert commands[0] == commands[1]
    assert Path(commands[0][0]).parent.name.startswith(f"{PROGRAM}-")


def test_interrupted_build_is_repeated_from_scratch() -> None:
    builds = Builds()
    client = Client(PROGRAM, (), builds)
    builds.fails = True
    with pytest.raises(KeyboardInterrupt):
        client.command()
    builds.fails = False

    client.command()

    assert builds.found == [SOURCES, SOURCES]


def test_client_is_built_again_if_its_program_is_gone() -> None:
    """A bug: a client ran in the interpreter of a checkout that had been deleted."""
    builds = Builds()
    client = Client(PROGRAM, (), builds)
    Path(client.command()[0]).unlink()

    (program,) = client.command()

    assert builds.found == [SOURCES, SOURCES]
    assert Path(program).exists()
