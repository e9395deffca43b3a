"""curl streams a chat over HTTP/2 by prior knowledge, and notices nothing when the worker is killed."""

import asyncio
import json
from asyncio.subprocess import PIPE
from typing import Any

from services.http.server.config import HttpConfig
from tests.clients.conftest import need
from tests.clients.support.cluster import Cluster
from tests.clients.support.programs import CLIENT_S_MAX
from tests.clients.support.toolchains import missing
from tests.http.support import Script, error_of, run, serving

ENOUGH = 5
ASKED = {
    "model": "mocker",
    "messages": [{"role": "user", "content": "Why does the moon have phases?"}],
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 8,
    "stream": True,
    "stream_options": {"include_usage": True},
}


def test_curl_streams_over_http2_though_the_worker_is_killed(cluster: Cluster) -> None:
    need(missing("curl"))

    async def test() -> tuple[list[Any], list[Any]]:
        await cluster.fill()
        undisturbed = await events(cluster, is_disturbed=False)
        return undisturbed, await events(cluster, is_disturbed=True)

    undisturbed, disturbed = asyncio.run(test())

    assert len(undisturbed) > ENOUGH
    assert answer_of(disturbed) == answer_of(undisturbed)
    assert answer_of(disturbed)[1]["completion_tokens"] == 120
    (move,) = cluster.plane.frontend.moves(disturbed[0]["id"].removeprefix("chatcmpl-"))
    assert move["reason"] == "DISCONNECTED"


def test_curl_over_http2_reads_the_refusal_of_a_body_that_is_too_large() -> None:
    """Bug: a reset behind the answer hid it."""
    need(missing("curl"))
    said: list[bytes] = []

    async def test() -> None:
        async with serving(Script(), config=HttpConfig(body_bytes_max=1000)) as server:
            words = [
                "curl",
                "-s",
                "--http2-prior-knowledge",
                "--data-binary",
                "@-",
                "-w",
                "\n%{http_version} %{http_code}",
            ]
            process = await asyncio.create_subprocess_exec(
                *words, f"http://127.0.0.1:{server.port}/v1/completions", stdin=PIPE, stdout=PIPE, stderr=PIPE
            )
            async with asyncio.timeout(CLIENT_S_MAX):
                said.extend(await process.communicate(bytes(4 << 20)))
            assert process.returncode == 0

    run(test)

    body, status = said[0].splitlines()
    assert (status, error_of(body)["code"]) == (b"2 413", "BODY_TOO_LARGE")


async def events(cluster: Cluster, *, is_disturbed: bool) -> list[Any]:
    """The events of one answer. `is_disturbed`: its worker is killed after ENOUGH of them."""
    url = f"{cluster.plane.frontend.http}/v1/chat/completions"
    words = ["curl", "-sN", "--fail", "--http2-prior-knowledge", "-w", "%{stderr}%{http_version}"]
    headers = ["-H", "content-type: application/json"]
    process = await asyncio.create_subprocess_exec(
        *words, *headers, "-d", json.dumps(ASKED), url, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    read: list[str] = []
    async with asyncio.timeout(CLIENT_S_MAX):
        while line := await process.stdout.readline():
            if line.startswith(b"data: "):
                read.append(line.decode().removeprefix("data: ").strip())
                if is_disturbed and len(read) == ENOUGH:
                    await cluster.kill_busy()
        _, said = await process.communicate()
    assert (process.returncode, said) == (0, b"2")
    *found, done = read
    assert done == "[DONE]"
    return [json.loads(event) for event in found]


def answer_of(found: list[Any]) -> tuple[str, Any]:
    """The text and the usage."""
    texts = [choice["delta"].get("content") or "" for event in found for choice in event["choices"]]
    return "".join(texts), found[-1]["usage"]
