"""The HTTP/2 server does what RFC 9113 asks for, as `h2spec` checks it in its strict mode."""

import re
import subprocess

from tests.clients.conftest import need
from tests.clients.support.serving import serving_program
from tests.clients.support.toolchains import H2SPEC

HTTP_1 = "2: Sends invalid connection preface"
"""Section 3.5, case 2. The port serves HTTP/1.1 as well: what is no preface is answered as a request of it, with 400.

RFC 9113, section 3.4: "A GOAWAY frame MAY be omitted in this case, since an invalid preface indicates that the peer is
not using HTTP/2."
"""
CASES_MIN = 140
TOOL_S_MAX = 300.0


def test_h2spec_passes_in_strict_mode() -> None:
    need(H2SPEC.missing)
    command = [*H2SPEC.command(), "--strict", "--host=127.0.0.1", "--timeout=10"]

    with serving_program("tests.clients.h2spec.server") as port:
        done = subprocess.run(
            [*command, f"--port={port}"], capture_output=True, text=True, timeout=TOOL_S_MAX, check=False
        )

    report = done.stdout
    found = re.search(r"(?P<all>\d+) tests, \d+ passed, (?P<skipped>\d+) skipped, (?P<failed>\d+) failed", report)
    assert found is not None, report
    assert int(found["all"]) >= CASES_MIN
    assert (found["skipped"], found["failed"]) == ("0", "1"), report
    assert re.findall(r"× (.*)$", report.partition("Failures:")[2], re.MULTILINE) == [HTTP_1]
