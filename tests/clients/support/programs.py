"""Runs the program of a client, which prints a line of JSON for each step."""

import asyncio
import json
import os
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.clients.support.cluster import Cluster

CLIENT_S_MAX = 180.0

Nemesis = Callable[[], Awaitable[None]]
Reported = dict[str, dict[str, Any]]
"""The fields that a program reports, by step."""


async def run(cluster: Cluster, command: list[str]) -> Reported:
    """Run the program; return what it reports. When it prints `begun`, the worker that serves its stream is killed."""
    await cluster.fill()
    return await steps(command, cluster.kill_busy)


async def steps(command: list[str], on_begun: Nemesis) -> Reported:
    """Run the program; return what it reports. `on_begun`: called when it prints `begun`."""
    reported: Reported = {}
    async with running(command) as process:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            step = json.loads(line)
            name = step.pop("step")
            reported[name] = step
            if name == "begun":
                await on_begun()
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
