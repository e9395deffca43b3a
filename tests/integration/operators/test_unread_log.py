"""A log that nobody reads blocks no stream and no probe, and is complete once somebody reads it.

| workload | nemesis | checker |
| --- | --- | --- |
| 300 short answers, a long one, a probe | the log is a full pipe | every answer; every line, once it is read |
"""

import asyncio
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.integration.conftest import Start
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S

PIPE_BYTES = 4096
ANSWERS = 300
AT_ONCE = 30
TOKENS = 100
LISTEN = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")


@pytest.fixture
def unread(tmp_path: Path) -> Iterator[int]:
    """Yield the read end of a small pipe at the path of the log of a process named `unread`."""
    path = tmp_path / "unread.log"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield fd
    os.close(fd)


def test_unread_log_blocks_nothing(start_plane: Start, fork_server: ForkServer, tmp_path: Path, unread: int) -> None:
    plane = start_plane()
    registry = f"--registry={plane.registry_address}"
    frontend = Frontend(fork_server, tmp_path, "unread", "frontend", *LISTEN, registry)
    try:
        asyncio.run(scenario(plane, frontend, unread))
    finally:
        frontend.kill()


async def scenario(plane: Plane, frontend: Frontend, unread: int) -> None:
    await plane.worker("--mocker-itl-ms=1")
    frontend.wait_ready()
    connector, timeout = aiohttp.TCPConnector(limit=AT_ONCE), aiohttp.ClientTimeout(total=WAIT_S)
    async with aiohttp.ClientSession(frontend.http, connector=connector, timeout=timeout) as session:
        await until(lambda: is_served(session))
        ids = {f"short-{number}" for number in range(ANSWERS)}
        tokens = await asyncio.gather(*(complete(session, name, 1) for name in ids))
        assert tokens == [1] * ANSWERS
        assert await complete(session, "long", TOKENS) == TOKENS
        async with session.get("/live") as live:
            assert live.status == 200
    log = PipeReader(unread)
    await until(lambda: log.request_ids() >= ids | {"long"})


async def is_served(session: aiohttp.ClientSession) -> bool:
    async with session.get("/v1/models") as models:
        return models.status == 200 and bool((await models.json())["data"])  # 503 until the worker is connected


async def complete(session: aiohttp.ClientSession, name: str, tokens: int) -> int:
    """Send a request; return the number of tokens in the answer's usage."""
    body = {"model": "mocker", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    async with session.post("/v1/completions", json=body, headers={"X-Request-Id": name}) as answer:
        usage = (await answer.json())["usage"]
    return int(usage["completion_tokens"])


class PipeReader:
    """The log as far as it has been read."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._text = b""

    def request_ids(self) -> set[str]:
        """Read what is available; return the ids of all requests with a line so far."""
        try:
            while piece := os.read(self._fd, 65536):
                self._text += piece
        except BlockingIOError:
            pass
        lines = [json.loads(line) for line in self._text.rpartition(b"\n")[0].splitlines() if line.startswith(b"{")]
        return {line["request_id"] for line in lines if line["event"] == "request"}
