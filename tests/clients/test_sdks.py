"""Stock SDKs need only the server's address, and lose nothing when their worker is killed.

The program for each SDK prints a line of JSON for each step. A step that is listed in CHECKS must pass its check,
whichever SDK runs it. Every program must run the steps in NEEDED.
"""

import asyncio
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import CLIENT_S_MAX, run
from tests.clients.support.sdk_checks import CHECKS, SAME, Step, request_id
from tests.clients.support.toolchains import OPENAI_PYTHON, SDKS, Client
from tests.docs.commands.shell import placed
from tests.docs.pages import command
from tests.integration.harness.plane.processes import Frontend

NEEDED = {"unary", "stream", "lost_worker"}
"""All of these send the same question. They report `id`, `text`, `finish_reason` and `usage`, under OpenAI's names."""

FAILURES = (
    "bad_request",
    "not_found",
    "model_not_found",
    "refusal",
    "retry",
    "timeout",
    "deadline",
    "broken_stream",
)
"""The steps of failures.py."""


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.name)
def test_stock_sdk_needs_only_the_servers_address(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)
    frontend = cluster.plane.frontend

    reported = asyncio.run(run(cluster, [*sdk.command(), f"{frontend.http}/v1"]))

    assert reported.keys() >= NEEDED
    check(reported, frontend)
    (move,) = frontend.moves(request_id(reported["lost_worker"]))
    assert move["reason"] == "DISCONNECTED"


def test_openai_package_speaks_http2_by_an_option_of_httpx_alone(cluster: Cluster) -> None:
    frontend = cluster.plane.frontend

    reported = asyncio.run(run(cluster, [*OPENAI_PYTHON.command(), "--http2", f"{frontend.http}/v1"]))

    assert reported["named"]["http_version"] == "HTTP/2"
    assert reported.keys() >= NEEDED
    check(reported, frontend)
    (move,) = frontend.moves(request_id(reported["lost_worker"]))
    assert move["reason"] == "DISCONNECTED"


@pytest.mark.parametrize("status", [503, 429])
def test_openai_package_distinguishes_failures_and_retries_when_told_to(cluster: Cluster, status: int) -> None:
    frontend = asyncio.run(cluster.another_frontend(f"--overload-status-code={status}"))

    reported = asyncio.run(run(cluster, [*openai_python("failures.py"), f"{frontend.http}/v1"]))

    check(reported, frontend)
    assert reported.keys() == {*FAILURES}
    first = reported["retry"]["attempts"][0]
    assert reported["refusal"]["status"] == first["status"] == status
    refused, taken = frontend.events_until_now("request", request_id=reported["retry"]["request_id"])
    assert (refused["outcome"], taken["outcome"]) == ("OVERLOADED", "length")
    assert begun_at_s(taken) - begun_at_s(refused) >= first["retry_after_s"]


def test_answers_match_the_types_of_the_openai_package_exactly(cluster: Cluster) -> None:
    reported = asyncio.run(run(cluster, [*openai_python("strict.py"), f"{cluster.plane.frontend.http}/v1"]))

    assert {step: fields["unknown"] for step, fields in reported.items()} == {
        "model": ["max_model_len"],
        "chat": [],
        "chat_stream": [],
        "completion": [],
        "completion_stream": [],
    }


def test_documented_program_prints_an_answer_as_it_arrives(cluster: Cluster) -> None:
    asyncio.run(cluster.fill())
    frontend = cluster.plane.frontend
    program = placed(
        command("from openai import OpenAI"), {"http://127.0.0.1:8000": frontend.http, "smollm2": "mocker"}
    )
    before = len(frontend.events_until_now("request", outcome="length"))

    done = subprocess.run([OPENAI_PYTHON.command()[0], "-c", program], capture_output=True, timeout=CLIENT_S_MAX)

    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.decode()) > 1
    (request,) = frontend.events_until_now("request", outcome="length")[before:]
    assert request["tokens"] == 80


def openai_python(program: str) -> list[str]:
    """Return the command of another program in that folder."""
    interpreter, client = OPENAI_PYTHON.command()
    return [interpreter, str(Path(client).with_name(program))]


def check(reported: dict[str, Step], frontend: Frontend) -> None:
    """Check every step that was reported."""
    assert reported.keys() <= CHECKS.keys() | SAME.keys() | {"begun"}
    for step in reported.keys() & CHECKS.keys():
        CHECKS[step](reported[step], frontend)
    for step in reported.keys() & SAME.keys():
        assert answer(reported[step]) == answer(reported[SAME[step]])


def answer(step: Step) -> Step:
    """Return a step without the fields that differ in every answer."""
    return {name: value for name, value in step.items() if name not in {"step", "id"}}


def begun_at_s(event: dict[str, Any]) -> float:
    """Return the Unix time at which a logged request arrived."""
    return datetime.fromisoformat(event["timestamp"]).timestamp() - float(event["duration_s"])
