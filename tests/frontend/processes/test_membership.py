"""A process of a group adopts the group's state before it accepts clients, and answers for the whole group."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.frontend.server import Frontend, FrontendConfig
from services.runtime.listen import reserve
from services.runtime.process import StartupError
from tests.frontend.processes.support import PREFIX, short_folder, supervised
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

ANY = "127.0.0.1:0"
NOBODY = "127.0.0.1:1"
POLL_S = 0.005
SETTLE_S_MAX = 0.3


def configured(
    member: Path,
    ready_file: Path | None = None,
    grpc: str = ANY,
    http: str = ANY,
    settle_s_max: float = SETTLE_S_MAX,
) -> FrontendConfig:
    return FrontendConfig(
        grpc_listen=grpc,
        http_listen=http,
        registries=(NOBODY,),
        member=member,
        settle_s_max=settle_s_max,
        ready_file=ready_file,
    )


@asynccontextmanager
async def running(member: Path, **options: Any) -> AsyncIterator[dict[str, str]]:
    """Run a process. Yields its addresses."""
    ready_file, stopping = member.with_suffix(".ready"), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(Frontend(configured(member, ready_file, **options)).run(stopping))
        while not ready_file.exists():
            await asyncio.sleep(POLL_S)
        try:
            yield json.loads(ready_file.read_text())
        finally:
            stopping.set()


async def ask(address: str, path: str, body: Any = None) -> tuple[int, str]:
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session, session.request(method, f"http://{address}{path}", json=body) as got:
        return got.status, await got.text()


def test_processes_of_a_group_share_their_ports() -> None:
    async def scenario() -> None:
        (grpc, grpc_holders), (http, http_holders) = reserve(ANY), reserve(ANY)
        async with (
            supervised(WAIT_S) as (_, folder),
            running(folder / "one", grpc=grpc, http=http) as first,
            running(folder / "other", grpc=grpc, http=http) as second,
        ):
            assert first == second == {"grpc": grpc, "http": http}
        for holder in (*grpc_holders, *http_holders):
            holder.close()

    run_async(scenario())


def test_each_process_answers_for_the_whole_group() -> None:
    async def scenario() -> None:
        async with (
            supervised(WAIT_S) as (_, folder),
            running(folder / "one") as first,
            running(folder / "other") as second,
        ):
            for address in (first["http"], second["http"]):
                status, text = await ask(address, "/metrics")
                cancel = await ask(address, "/v1/requests/mine/cancel", {})

                assert status == 200
                assert f"{PREFIX}_processes 2.0" in text
                assert cancel == (200, '{"id":"mine","cancelled":0}')

    run_async(scenario())


def test_new_process_adopts_the_thresholds_of_the_group() -> None:
    async def scenario() -> None:
        async with supervised(WAIT_S) as (group, folder):
            await group.set_thresholds("m", {"active_decode_blocks_threshold": 0.25})
            frontend = Frontend(configured(folder / "one"))
            stopping = asyncio.Event()
            stopping.set()
            await frontend.run(stopping)

            assert frontend._busy.of("m").active_decode_blocks == 0.25

    run_async(scenario())


@pytest.mark.parametrize("is_successor", [False, True])
def test_process_that_replaces_another_waits_for_workers_before_it_listens(is_successor: bool) -> None:
    """Meanwhile the other processes serve all clients. The wait is bounded, because there may be no worker."""
    settle_s_max = SETTLE_S_MAX if is_successor else 10 * WAIT_S  # The test would time out.

    async def scenario() -> float:
        async with supervised(WAIT_S) as (group, folder):
            if is_successor:
                group.join("one", folder / "one.0.sock", pid=1)
            clock = asyncio.get_running_loop().time
            began = clock()
            async with running(folder / "one", settle_s_max=settle_s_max):
                return clock() - began

    took_s = run_async(scenario())

    assert took_s >= SETTLE_S_MAX or not is_successor


def test_process_does_not_start_without_a_supervisor() -> None:
    async def scenario() -> None:
        with short_folder() as folder:
            await Frontend(configured(folder / "one")).run(asyncio.Event())

    with pytest.raises(StartupError, match="cannot join the other processes"):
        run_async(scenario())
