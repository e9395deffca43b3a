"""The README's commands for grpcurl and `buf curl` do what it says, by reflection alone; that for stubs makes them.

The addresses and the model's name are those of the test's plane; everything else is run as it stands there.
"""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.cluster import Cluster
from tests.clients.conftest import need
from tests.clients.toolchains import CLIENTS, GRPCURL
from tests.readme import page

BUF = ".venv/bin/buf"
COMMAND_S_MAX = 20.0
COMMANDS = {
    # The tool, and what its command has in it: what it prints must have in it.
    ("grpcurl", " list"): r"^unbroken\.v1\.Inference$",
    ("grpcurl", " describe "): r"rpc Generate \( \.unbroken\.v1\.GenerateRequest \) returns \( stream ",
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
    """The one with this in it."""
    (one,) = [each for each in page.commands() if each.startswith(f"{tool} ") and part in each]
    return one


@pytest.mark.parametrize(("tool", "part"), COMMANDS)
def test_a_command_of_the_readme_does_what_it_says(cluster: Cluster, tool: str, part: str) -> None:
    if tool == "grpcurl":
        need(GRPCURL.missing)
    asyncio.run(cluster.fill())
    words = command(tool, part)
    here = {
        "127.0.0.1:50051": cluster.plane.frontend.grpc,
        "127.0.0.1:50050": cluster.plane.registry_address,
        "smollm2": "mocker",
        f"{BUF} ": f"{Path(sys.executable).parent / 'buf'} ",
    }
    for there, own in here.items():
        words = words.replace(there, own)

    printed = run(words, tool)

    assert re.search(COMMANDS[tool, part], printed, re.MULTILINE), printed


def run(words: str, tool: str) -> str:
    """What a shell prints for it."""
    folder = f"{Path(GRPCURL.command()[0]).parent}:" if tool == "grpcurl" else ""
    env = os.environ | {"PATH": folder + os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", words], env=env, capture_output=True, text=True, timeout=COMMAND_S_MAX)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_for_stubs_makes_them(tmp_path: Path) -> None:
    """With what the client in Python needs, and nothing of ours."""
    (client,) = [client for client in CLIENTS if client.name == "python"]
    interpreter, _ = client.command()
    (tmp_path / "proto").symlink_to(page.ROOT / "proto")
    words = page.command("python -m grpc_tools.protoc").replace("python ", f"{interpreter} ", 1)

    subprocess.run(["bash", "-c", words], cwd=tmp_path, check=True, timeout=COMMAND_S_MAX)

    made = {path.name for path in (tmp_path / "unbroken" / "v1").iterdir()}
    assert made == {"inference_pb2.py", "inference_pb2_grpc.py"}
