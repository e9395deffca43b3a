"""The README's commands for grpcurl and `buf curl` do what it says, by reflection alone.

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
from tests.clients.toolchains import GRPCURL

README = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
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


def commands() -> list[str]:
    """Those of the README, each with its lines."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    starts = rf"^(?=grpcurl |{re.escape(BUF)} )"
    return [one for block in blocks for one in re.split(starts, block, flags=re.MULTILINE) if re.match(starts, one)]


def command(tool: str, part: str) -> str:
    """The one with this in it."""
    (one,) = [each for each in commands() if each.startswith(tool) and part in each]
    return one


def test_each_command_is_tried() -> None:
    assert sorted(commands()) == sorted(command(*key) for key in COMMANDS)


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
