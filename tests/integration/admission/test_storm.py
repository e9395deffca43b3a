"""A storm of requests on a worker with room for few: each is answered or refused with its reason, nobody else notices,
and nothing is left of it.

| workload | nemesis | checker |
| --- | --- | --- |
| streams under way | 500 requests at once, HTTP on new and on open connections, gRPC | \
at least N + Q answers, the rest refused; the streams whole; all gauges 0, no file and no bug left |

How long it all takes is measured by bench/storm.py.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.clients.client_pool import ClientPool, Replies
from bench.clients.wires import ANSWERED, REFUSED, Wire
from bench.storm import GAUGES, GRPC_CONNECTIONS, bugs_in, wires
from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, answers_under_fault, run_together
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until

SLOTS = PLACES = 8
REQUESTS = 500
TOKENS = 20
STREAMS = [Request(protocol, seed=number, max_tokens=40) for number, protocol in enumerate(("stream", "grpc"))]
KINDS = [("stream", False), ("stream", True), ("unary", False), ("grpc", True)]


@pytest.fixture(scope="module")
def stormy(start_plane: Start) -> tuple[Plane, Process]:
    """A plane and its only worker."""
    plane = start_plane()
    limits = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}")
    return plane, asyncio.run(plane.worker(*limits, "--mocker-itl-ms=20"))


def storm(address: str, wire: Callable[[], Wire], connections: int, *, is_open: bool) -> Replies:
    with ClientPool(address, connections, wire) as pool:
        if is_open:
            pool.connect()
        return pool.send_all(REQUESTS // connections)


@pytest.mark.parametrize(("name", "is_open"), KINDS, ids=lambda value: str(value))
def test_every_request_of_a_storm_gets_a_reply_and_nothing_is_left_over(
    stormy: tuple[Plane, Process], name: str, is_open: bool
) -> None:
    plane, worker = stormy
    address = plane.frontend.grpc if name == "grpc" else plane.frontend.metrics_address
    connections = GRPC_CONNECTIONS if name == "grpc" else REQUESTS

    async def scenario() -> Replies:
        undisturbed = await run_together(answer(plane.frontend, request) for request in STREAMS)
        replies: list[Replies] = []

        async def strike() -> None:
            replies.append(await asyncio.to_thread(storm, address, wires(TOKENS)[name], connections, is_open=is_open))

        assert await answers_under_fault(plane.frontend, STREAMS, strike) == undisturbed
        await until(lambda: is_idle(plane, worker))
        assert await answer(plane.frontend, STREAMS[0]) == undisturbed[0]
        return replies[0]

    files = open_files(plane)
    replies = asyncio.run(scenario())

    assert replies.counts.keys() == {ANSWERED, REFUSED}
    assert sum(replies.counts.values()) == REQUESTS
    assert replies.counts[ANSWERED] >= SLOTS + PLACES - len(STREAMS)
    asyncio.run(until(lambda: open_files(plane) <= files))
    assert not bugs_in(plane.frontend) + bugs_in(worker)


async def is_idle(plane: Plane, worker: Process) -> bool:
    """All gauges are 0 on both sides."""
    return not sum([await process.metric(gauge) for process in (plane.frontend, worker) for gauge in GAUGES])


def open_files(plane: Plane) -> int:
    return len(list(Path(f"/proc/{plane.frontend.pid}/fd").iterdir()))
