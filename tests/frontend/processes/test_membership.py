"""One of several processes: it is as the others are before it takes clients, and answers for all of them."""

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
from tests.support.doubles import TEST_S_MAX, run_async

ANY = "127.0.0.1:0"
NOBODY = "127.0.0.1:1"
POLL_S = 0.005
ANSWER_S_MAX = 10.0
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
    """The addresses of a process that runs."""
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


def test_processes_share_their_ports() -> None:
    async def scenario() -> None:
        (grpc, grpc_holders), (http, http_holders) = reserve(ANY), reserve(ANY)
        async with (
            supervised(ANSWER_S_MAX) as (_, folder),
            running(folder / "one", grpc=grpc, http=http) as first,
            running(folder / "other", grpc=grpc, http=http) as second,
        ):
            assert first == second == {"grpc": grpc, "http": http}
        for holder in (*grpc_holders, *http_holders):
            holder.close()

    run_async(scenario())


def test_each_answers_for_all() -> None:
    async def scenario() -> None:
        async with (
            supervised(ANSWER_S_MAX) as (_, folder),
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


def test_thresholds_that_were_set_before_it_came_are_its_own() -> None:
    async def scenario() -> None:
        async with supervised(ANSWER_S_MAX) as (group, folder):
            await group.set_thresholds("m", {"active_decode_blocks_threshold": 0.25})
            frontend = Frontend(configured(folder / "one"))
            stopping = asyncio.Event()
            stopping.set()
            await frontend.run(stopping)

            assert frontend._busy.of("m").active_decode_blocks == 0.25

    run_async(scenario())


@pytest.mark.parametrize("comes_second", [False, True])
def test_who_comes_in_place_of_another_looks_for_workers_first(comes_second: bool) -> None:
    """Until then the others have the clients; but not for ever, since there may be no worker."""
    settle_s_max = SETTLE_S_MAX if comes_second else 10 * TEST_S_MAX  # Nobody waits so long here.

    async def scenario() -> float:
        async with supervised(ANSWER_S_MAX) as (group, folder):
            if comes_second:
                group.join("one", folder / "one.0.sock", pid=1)
            clock = asyncio.get_running_loop().time
            began = clock()
            async with running(folder / "one", settle_s_max=settle_s_max):
                return clock() - began

    took_s = run_async(scenario())

    assert took_s >= SETTLE_S_MAX or not comes_second


def test_without_a_supervisor_it_does_not_start() -> None:
    async def scenario() -> None:
        with short_folder() as folder:
            await Frontend(configured(folder / "one")).run(asyncio.Event())

    with pytest.raises(StartupError, match="cannot join the other processes"):
        run_async(scenario())
