"""The commands of docs/clients.md generate stubs, in a copy of this tree and with the tools that build the clients."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.conftest import need
from tests.clients.support.toolchains import BUILD_S_MAX, CLIENTS
from tests.docs import pages

STUBS = "/tmp/stubs"
JAVA = "tests/clients/java/target/generated-sources/protobuf"
QUICK = {"npm_config_prefer_offline": "true"}
"""What was downloaded before is not requested again."""
PROGRAMS = {client.name: client for client in CLIENTS}


@dataclass(frozen=True)
class Language:
    """A text that identifies a language's block, and some files that it generates, in the tree or below STUBS."""

    client: str
    part: str
    files: tuple[str, ...]


LANGUAGES = (
    Language(
        "python",
        "grpc_tools.protoc",
        (f"{STUBS}/python/unbroken/v1/inference_pb2.py", f"{STUBS}/python/unbroken/v1/inference_pb2_grpc.py"),
    ),
    Language(
        "go",
        "go install tool",
        (f"{STUBS}/go/unbroken/inference.pb.go", f"{STUBS}/go/unbroken/inference_grpc.pb.go"),
    ),
    Language(
        "java",
        "mvn",
        (f"{JAVA}/java/unbroken/v1/GenerateRequest.java", f"{JAVA}/grpc-java/unbroken/v1/InferenceGrpc.java"),
    ),
    Language("connect", "npm ci", ("tests/clients/connect/gen/unbroken/v1/inference_pb.js",)),
)


def blocks() -> list[str]:
    """Return the blocks of the section that generates stubs from files."""
    _, _, below = pages.text_of("docs/clients.md").partition("\n### Stubs\n")
    section, _, _ = below.partition("\n## ")
    return [block for _, block in pages.blocks_in(section) if not block.startswith("grpcurl ")]


def block_with(part: str) -> str:
    (one,) = [block for block in blocks() if part in block]
    return one


def copy_tree(folder: Path) -> None:
    """Copy what the commands use, without what they have generated in this tree."""
    shutil.copy(pages.ROOT / "buf.yaml", folder)
    shutil.copytree(pages.ROOT / "proto", folder / "proto")
    made = shutil.ignore_patterns("node_modules", "gen", "proto", "target", "__pycache__")
    shutil.copytree(pages.ROOT / "tests" / "clients", folder / "tests" / "clients", ignore=made)
    (folder / ".venv").symlink_to(sys.prefix)


def test_every_documented_block_is_tested() -> None:
    assert sorted(blocks()) == sorted(block_with(language.part) for language in LANGUAGES)


@pytest.mark.parametrize("language", LANGUAGES, ids=lambda language: language.client)
def test_documented_commands_generate_the_stubs_of_a_language(tmp_path: Path, language: Language) -> None:
    client = PROGRAMS[language.client]
    need(client.missing)
    tools = Path(client.command()[0]).parent
    copy_tree(tmp_path)
    stubs = str(tmp_path / "stubs")

    subprocess.run(
        ["bash", "-ec", block_with(language.part).replace(STUBS, stubs)],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", **QUICK},
        check=True,
        timeout=BUILD_S_MAX,
    )

    for name in language.files:
        assert (tmp_path / name.replace(STUBS, stubs)).is_file(), name
