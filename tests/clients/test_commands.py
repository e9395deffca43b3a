"""The grpcurl and `buf curl` commands in the documentation work as described, through reflection alone.

Addresses and the model's name are replaced with those of the test's plane; everything else runs as it is printed.
"""

import asyncio
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.toolchains import BUF as VENV_BUF
from tests.clients.support.toolchains import GRPCURL, INFERENCE
from tests.docs import pages

BUF = ".venv/bin/buf"
COMMAND_S_MAX = 60.0
COMMANDS = {
    # The tool and a part of its command: what its output must contain.
    ("grpcurl", "-plaintext 127.0.0.1:50051 list"): r"^unbroken\.v1\.Inference$",
    ("grpcurl", "-plaintext 127.0.0.1:50051 describe"): r"rpc Generate \( \.unbroken\.v1\.GenerateRequest \) returns",
    ("grpcurl", "-proto-out-dir"): r"^service Inference {$",
    ("grpcurl", "Health/Check"): r'"status": "SERVING"',
    ("grpcurl", "Registry/List"): r'"model": "mocker"',
    ("grpcurl", "Inference/Generate"): r'"complete_final": true\n}\n\Z',
    ("grpcurl", "Admin/SetBusyThreshold"): r'"active_decode_blocks_threshold": 0\.9',
    (BUF, "--list-services"): r"^unbroken\.v1\.Inference$",
    (BUF, "--list-methods"): r"^unbroken\.v1\.Inference/Generate$",
    (BUF, "Health/Check"): r'"status": *"SERVING"',
    (BUF, "Registry/List"): r'"model": *"mocker"',
    (BUF, "Inference/Generate"): r'"completeFinal": *true\s*}\n\Z',
    (BUF, "Admin/SetBusyThreshold"): r'"activeDecodeBlocksThreshold": *0\.9',
}


def command(tool: str, part: str) -> str:
    """Return the command of this tool that contains this part."""
    (one,) = [each for each in pages.commands() if each.startswith(f"{tool} ") and part in each]
    return one


@pytest.mark.parametrize(("tool", "part"), COMMANDS)
def test_documented_command_prints_what_it_should(cluster: Cluster, tool: str, part: str, tmp_path: Path) -> None:
    printed = printed_by(cluster, tool, part, tmp_path)

    assert re.search(COMMANDS[tool, part], printed, re.MULTILINE), printed


def test_reflection_serves_the_proto_file_of_the_server(cluster: Cluster, tmp_path: Path) -> None:
    """Comments and options are left out: options only concern the generated code of one language."""
    printed_by(cluster, "grpcurl", "-proto-out-dir", tmp_path)

    assert described(tmp_path / "proto") == described(pages.ROOT / "proto")


def described(folder: Path) -> Any:
    """Return the descriptor of inference.proto in a folder."""
    command = (VENV_BUF, "build", "--path", INFERENCE, "--exclude-source-info", "-o", "-#format=json")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_S_MAX, check=True)
    (file,) = json.loads(done.stdout)["file"]
    file.pop("options", None)
    return file


def printed_by(cluster: Cluster, tool: str, part: str, stubs: Path) -> str:
    """Run the command and return its output. It may write files to `stubs`."""
    if tool == "grpcurl":
        need(GRPCURL.missing)
    asyncio.run(cluster.fill())
    words = command(tool, part)
    here = {
        "127.0.0.1:50051": cluster.plane.frontend.grpc,
        "127.0.0.1:50050": cluster.plane.registry_address,
        "smollm2": "mocker",
        "/tmp/stubs": str(stubs),
        f"{BUF} ": f"{VENV_BUF} ",
    }
    for there, own in here.items():
        words = words.replace(there, own)
    return run(words, tool)


def run(words: str, tool: str) -> str:
    """Run the words in a shell and return the output."""
    folder = f"{Path(GRPCURL.command()[0]).parent}:" if tool == "grpcurl" else ""
    env = os.environ | {"PATH": folder + os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", words], env=env, capture_output=True, text=True, timeout=COMMAND_S_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout
