"""Runs the program of a client.

It prints lines of JSON, and when it says `begun`, the worker under its stream is killed.
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
    """What the program says of each step; its worker is killed meanwhile."""
    await cluster.fill()
    told: dict[str, Any] = {}
    async with started(command) as process:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            step = json.loads(line)
            told[step["step"]] = step
            if step["step"] == "begun":
                await cluster.kill_busy()
        assert await process.wait() == 0
    return told


@asynccontextmanager
async def started(command: list[str], stderr: int | None = None) -> AsyncIterator[Process]:
    """The program, for CLIENT_S_MAX at most, with nothing of ours in its reach."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=stderr, env=environment)
    try:
        async with asyncio.timeout(CLIENT_S_MAX):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
