"""Runs the program of a client.

The program prints lines of JSON. When it prints `begun`, the worker that serves its stream is killed.
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.clients.support.cluster import Cluster

CLIENT_S_MAX = 180.0


async def run(cluster: Cluster, command: list[str]) -> dict[str, Any]:
    """Run the program; return what it reports for each step. A worker is killed meanwhile."""
    await cluster.fill()
    reported: dict[str, Any] = {}
    async with running(command) as process:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            step = json.loads(line)
            reported[step["step"]] = step
            if step["step"] == "begun":
                await cluster.kill_busy()
        assert await process.wait() == 0
    return reported


@asynccontextmanager
async def running(command: list[str], stderr: int | None = None) -> AsyncIterator[Process]:
    """Start the program, isolated from this project's packages, and kill it after CLIENT_S_MAX."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=stderr, env=environment)
    try:
        async with asyncio.timeout(CLIENT_S_MAX):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
