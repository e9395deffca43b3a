"""A worker that lost its connection gets no request until its quarantine ends."""

import asyncio
import time

from services.frontend.session.pool import PoolConfig
from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, background_stream
from tests.integration.harness.plane.rogue_worker import RogueSession, rogue_worker
from tests.integration.harness.waiting import until

ITL = "--mocker-itl-ms=5"


def test_quarantine_does_not_end_when_other_workers_register(start_plane: Start) -> None:
    plane = start_plane()
    requests_received_at: list[float] = []

    async def close_after_the_first_request(session: RogueSession) -> None:
        await session.send_welcome()
        await session.receive_request()
        requests_received_at.append(time.time())

    async def scenario() -> None:
        await plane.worker(ITL)
        undisturbed = await answer(plane.frontend, Request("grpc"))
        assert undisturbed.token_ids is not None
        async with (
            background_stream(plane.frontend),
            rogue_worker(plane.registry_address, close_after_the_first_request, undisturbed.token_ids) as rogue,
        ):
            await until(lambda: plane.frontend.events("worker found", instance=rogue))
            assert await answer(plane.frontend, Request("grpc")) == undisturbed
            await until(lambda: len(plane.frontend.events("worker found", instance=rogue)) == 2)
            await plane.worker(ITL)
            for _ in range(10):
                assert await answer(plane.frontend, Request("grpc", max_tokens=1))
            lost_at, *_ = plane.frontend.times("worker lost", instance=rogue)
            assert all(later > lost_at + PoolConfig().quarantine_s for later in requests_received_at[1:])

    asyncio.run(scenario())
    assert requests_received_at
