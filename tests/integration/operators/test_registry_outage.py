"""An outage of the registry or of etcd fails no running request; workers that start meanwhile are found afterwards.

| workload | nemesis | checker |
| --- | --- | --- |
| 8 clients that never pause, all protocols | SIGKILL of registry or etcd, for a while | every `Answer` |
| a worker that starts in the outage, one that starts after it | the same | both serve; all are registered |

UNBROKEN_OUTAGE_S sets the length of the outage, which is longer than the workers' leases by default.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs.registry_pb2 import ListRequest
from services.stubs.registry_pb2_grpc import RegistryStub
from tests.integration.conftest import Start
from tests.integration.harness.clients.requests import PROTOCOLS, Request
from tests.integration.harness.clients.send import answer
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until
from tests.registry.support import Etcd
from tests.support.clock import WAIT_S

OUTAGE_S = float(os.environ.get("UNBROKEN_OUTAGE_S", "3"))
CLIENTS = 8
OPTIONS = ("--lease=2", "--mocker-itl-ms=2")


@pytest.fixture
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    server.start()
    server.wait_listening()
    yield server
    server.kill()


def test_losing_the_registry_fails_no_request(start_plane: Start) -> None:
    plane = start_plane()

    asyncio.run(outage(plane, plane.registry.kill, plane.restart_registry))


@pytest.mark.etcd
def test_losing_a_registry_over_etcd_fails_no_request(start_plane: Start, etcd: Etcd) -> None:
    plane = start_plane(registry=store_options(etcd))

    asyncio.run(outage(plane, plane.registry.kill, plane.restart_registry))


@pytest.mark.etcd
def test_losing_etcd_fails_no_request(start_plane: Start, etcd: Etcd) -> None:
    plane = start_plane(registry=store_options(etcd))

    asyncio.run(outage(plane, etcd.kill, etcd.start))


def store_options(etcd: Etcd) -> tuple[str, ...]:
    return ("--store=etcd", f"--etcd-endpoints={etcd.endpoint}")


async def outage(plane: Plane, begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Keep up the load from before the outage until after it, and start two workers meanwhile."""
    workers = [await plane.worker(*OPTIONS) for _ in range(2)]
    stop, served = asyncio.Event(), count()
    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(send_again_and_again(plane, Request(PROTOCOLS[number % 3], seed=number), stop, served))
        await until(lambda: next(served) > CLIENTS)
        begin()
        workers.append(plane.launch(*OPTIONS))
        await asyncio.sleep(OUTAGE_S)  # Not synchronisation: the length of the outage is what is tested.
        assert not plane.frontend.has_found(workers[-1]), "there was no outage"
        end()
        workers.append(plane.launch(*OPTIONS))
        for worker in workers[2:]:
            await plane.found(worker)
            await until(partial(has_served, worker))
        await until(lambda: registered(plane.registry_address, workers))
        stop.set()
    assert await plane.frontend.metric("dynamo_frontend_requests_total", status="error") == 0


async def send_again_and_again(plane: Plane, request: Request, stop: asyncio.Event, served: Iterator[int]) -> None:
    """Send the request until `stop`; every answer must equal the first."""
    undisturbed = await answer(plane.frontend, request)
    while not stop.is_set():
        assert await answer(plane.frontend, request) == undisturbed
        next(served)


async def has_served(worker: Process) -> bool:
    return await worker.metric("unbroken_engine_steps_total") > 0


async def registered(registry: str, workers: list[Process]) -> bool:
    """Whether the registry knows exactly these workers. False while it cannot answer."""
    async with grpc.aio.insecure_channel(registry, options=CHANNEL_OPTIONS) as channel:
        try:
            known = await RegistryStub(channel).List(ListRequest(), timeout=WAIT_S)
        except grpc.aio.AioRpcError:
            return False
    return {one.instance_id for one in known.instances} == {worker.ready["instance_id"] for worker in workers}
