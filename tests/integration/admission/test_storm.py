"""A storm of requests on a worker with few slots: each is answered or refused with its reason, and nothing else
suffers.

| workload | nemesis | checker |
| --- | --- | --- |
| running streams | 500 requests at once, HTTP on new and on open connections, gRPC | \
at least N + Q answers, the rest refused; the streams complete; all gauges 0, no open file and no logged error left |

`python -m bench.storm` measures how long it all takes.
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
def storm_target(start_plane: Start) -> tuple[Plane, Process]:
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
    storm_target: tuple[Plane, Process], name: str, is_open: bool
) -> None:
    plane, worker = storm_target
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
    """Whether all gauges are 0 on both sides."""
    return not sum([await process.metric(gauge) for process in (plane.frontend, worker) for gauge in GAUGES])


def open_files(plane: Plane) -> int:
    return len(list(Path(f"/proc/{plane.frontend.pid}/fd").iterdir()))
