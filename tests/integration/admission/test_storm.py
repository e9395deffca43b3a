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

from bench.crowd import ANSWERED, REFUSED, Crowd, Replies, Wire
from bench.storm import GAUGES, GRPC_CONNECTIONS, bugs_in, wires
from tests.integration.conftest import Start
from tests.integration.harness.asks import Ask
from tests.integration.harness.clients import answer, gathered, under_streams
from tests.integration.harness.plane import Plane, Process, until

SLOTS = PLACES = 8
REQUESTS = 500
TOKENS = 20
STREAMS = [Ask(protocol, seed=number, max_tokens=40) for number, protocol in enumerate(("stream", "grpc"))]
KINDS = [("stream", False), ("stream", True), ("unary", False), ("grpc", True)]


@pytest.fixture(scope="module")
def stormy(start_plane: Start) -> tuple[Plane, Process]:
    """A plane and its only worker."""
    plane = start_plane()
    limits = (f"--engine-request-limit={SLOTS}", f"--request-queue-limit={PLACES}")
    return plane, asyncio.run(plane.worker(*limits, "--mocker-itl-ms=20"))


def storm(address: str, wire: Callable[[], Wire], connections: int, *, is_open: bool) -> Replies:
    with Crowd(address, connections, wire) as crowd:
        if is_open:
            crowd.connect()
        return crowd.ask(REQUESTS // connections)


@pytest.mark.parametrize(("name", "is_open"), KINDS, ids=lambda value: str(value))
def test_every_request_of_a_storm_has_its_reply_and_nothing_is_left(
    stormy: tuple[Plane, Process], name: str, is_open: bool
) -> None:
    plane, worker = stormy
    address = plane.frontend.grpc if name == "grpc" else plane.frontend.metrics_address
    connections = GRPC_CONNECTIONS if name == "grpc" else REQUESTS

    async def scenario() -> Replies:
        undisturbed = await gathered(answer(plane.frontend, ask) for ask in STREAMS)
        replies: list[Replies] = []

        async def strike() -> None:
            replies.append(await asyncio.to_thread(storm, address, wires(TOKENS)[name], connections, is_open=is_open))

        assert await under_streams(plane.frontend, STREAMS, strike) == undisturbed
        await until(lambda: is_quiet(plane, worker))
        assert await answer(plane.frontend, STREAMS[0]) == undisturbed[0]
        return replies[0]

    files = open_files(plane)
    replies = asyncio.run(scenario())

    assert replies.counts.keys() == {ANSWERED, REFUSED}
    assert sum(replies.counts.values()) == REQUESTS
    assert replies.counts[ANSWERED] >= SLOTS + PLACES - len(STREAMS)
    asyncio.run(until(lambda: open_files(plane) <= files))
    assert not bugs_in(plane.frontend) + bugs_in(worker)


async def is_quiet(plane: Plane, worker: Process) -> bool:
    """All gauges are 0 on both sides."""
    return not sum([await process.metric(gauge) for process in (plane.frontend, worker) for gauge in GAUGES])


def open_files(plane: Plane) -> int:
    return len(list(Path(f"/proc/{plane.frontend.pid}/fd").iterdir()))
