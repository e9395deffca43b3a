"""The client for JavaScript has tests of its own, written as those of the client for Python."""

import subprocess

from tests.clients.conftest import need
from tests.clients.support.programs import CLIENT_S_MAX
from tests.clients.support.toolchains import PACKAGES, missing


def test_client_for_javascript_passes_its_own_tests() -> None:
    need(missing("node"))

    done = subprocess.run(["node", "--test"], cwd=PACKAGES / "js", capture_output=True, text=True, timeout=CLIENT_S_MAX)

    assert done.returncode == 0, done.stdout
