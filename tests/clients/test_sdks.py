"""Stock SDKs need our address alone, and lose nothing when their worker is killed.

What an SDK makes of our answers is told by its program, a line of JSON for each step. A step that is in CHECKS must be
what that says of it, whichever SDK takes it. NEEDED are those that each takes.
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
"""The same question each time. They tell `id`, `text`, `finish_reason` and `usage`, with OpenAI's names in it."""

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
"""What failures.py meets."""


@pytest.mark.parametrize("sdk", SDKS, ids=lambda sdk: sdk.name)
def test_a_stock_sdk_needs_nothing_but_our_address(cluster: Cluster, sdk: Client) -> None:
    need(sdk.missing)
    frontend = cluster.plane.frontend

    told = asyncio.run(run(cluster, [*sdk.command(), f"{frontend.http}/v1"]))

    assert told.keys() >= NEEDED
    check(told, frontend)
    (move,) = frontend.moves(request_id(told["lost_worker"]))
    assert move["reason"] == "DISCONNECTED"


@pytest.mark.parametrize("status", [503, 429])
def test_the_openai_package_tells_failures_apart_and_comes_back_when_it_was_told_to(
    cluster: Cluster, status: int
) -> None:
    frontend = asyncio.run(cluster.another_frontend(f"--overload-status-code={status}"))

    told = asyncio.run(run(cluster, [*openai_python("failures.py"), f"{frontend.http}/v1"]))

    check(told, frontend)
    assert told.keys() == {*FAILURES}
    first = told["retry"]["attempts"][0]
    assert told["refusal"]["status"] == first["status"] == status
    refused, taken = frontend.events("request", request_id=told["retry"]["request_id"])
    assert (refused["outcome"], taken["outcome"]) == ("OVERLOADED", "length")
    assert begun_at_s(taken) - begun_at_s(refused) >= first["retry_after_s"]


def test_answers_are_to_the_letter_what_the_types_of_the_openai_package_say(cluster: Cluster) -> None:
    told = asyncio.run(run(cluster, [*openai_python("strict.py"), f"{cluster.plane.frontend.http}/v1"]))

    assert {step: fields["unknown"] for step, fields in told.items()} == {
        "model": ["max_model_len"],
        "chat": [],
        "chat_stream": [],
        "completion": [],
        "completion_stream": [],
    }


def test_the_program_of_the_pages_prints_an_answer_as_it_comes(cluster: Cluster) -> None:
    asyncio.run(cluster.fill())
    frontend = cluster.plane.frontend
    program = placed(
        command("from openai import OpenAI"), {"http://127.0.0.1:8000": frontend.http, "smollm2": "mocker"}
    )
    before = len(frontend.events("request", outcome="length"))

    done = subprocess.run([OPENAI_PYTHON.command()[0], "-c", program], capture_output=True, timeout=CLIENT_S_MAX)

    assert (done.returncode, done.stderr) == (0, b"")
    assert len(done.stdout.decode()) > 1
    (request,) = frontend.events("request", outcome="length")[before:]
    assert request["tokens"] == 80


def openai_python(program: str) -> list[str]:
    """The command of another program in that folder."""
    interpreter, client = OPENAI_PYTHON.command()
    return [interpreter, str(Path(client).with_name(program))]


def check(told: dict[str, Step], frontend: Frontend) -> None:
    """Every step that it tells."""
    assert told.keys() <= CHECKS.keys() | SAME.keys() | {"begun"}
    for step in told.keys() & CHECKS.keys():
        CHECKS[step](told[step], frontend)
    for step in told.keys() & SAME.keys():
        assert answer(told[step]) == answer(told[SAME[step]])


def answer(step: Step) -> Step:
    """Without what is another in every answer."""
    return {name: value for name, value in step.items() if name not in {"step", "id"}}


def begun_at_s(event: dict[str, Any]) -> float:
    """When a request came that the frontend has logged, in seconds since the epoch."""
    return datetime.fromisoformat(event["timestamp"]).timestamp() - float(event["duration_s"])
