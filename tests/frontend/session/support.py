"""What the tests of a session share: a worker's end played by a test, and the frontend's end as the pool drives it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.discovery.client import InstanceRecord
from services.frontend.session.session import WorkerSession, WorkerSessionConfig
from services.frontend.session.stream import Stream
from services.rpc.codec import card_to_wire
from services.stubs import worker_pb2
from services.stubs.inference_pb2 import FINISH_REASON_STOP
from services.tls.peers import Peers
from tests.support.clock import WAIT_S
from tests.support.doubles import CARD, Collected, make_request, run_async
from tests.support.raw_session import RawSession, serve_raw_sessions
from tests.support.steps import step_of

WELCOME = worker_pb2.Welcome(instance_id="i", card=card_to_wire(CARD))
PATIENT = WorkerSessionConfig(stall_s=WAIT_S, full_s=WAIT_S)
"""Limits that no end exceeds on a busy machine."""
QUICK = WorkerSessionConfig(connect_timeout_s=0.3, stall_s=0.05)
"""Limits for a session that is to be lost."""
Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The worker's end of a session, played by a test."""

    def __init__(self, raw: RawSession) -> None:
        self.raw = raw

    async def welcome(self) -> None:
        await self.send(welcome=WELCOME)

    async def send(self, **fields: Any) -> None:
        await self.raw.send(worker_pb2.WorkerMessage(**fields))

    async def read(self) -> worker_pb2.FrontendMessage:
        message = await self.raw.read()
        assert isinstance(message, worker_pb2.FrontendMessage)
        return message

    async def tokens(self, *entries: tuple[int, int, list[int]]) -> None:
        await self.send(step=step_of(*entries))

    async def finish(self, stream_id: int) -> None:
        end = worker_pb2.StreamEnd(stream_id=stream_id, finish_reason=FINISH_REASON_STOP, complete_final=True)
        await self.send(ends=[end])


class Client:
    """The frontend's end, as the pool drives it. `later_s`: added to the time of every check."""

    def __init__(self, session: WorkerSession) -> None:
        self.session = session
        self.lost: Failure | None = None
        self.later_s = 0.0

    def check(self) -> None:
        self.session.check(asyncio.get_running_loop().time() + self.later_s)

    def open(self, **call: Any) -> tuple[Stream, Collected]:
        collected = Collected()
        return self.session.open(make_request(), Call(**({"request_id": "r"} | call)), collected), collected


Use = Callable[[Client], Awaitable[None]]


async def nothing(_: Client) -> None:
    """Open no stream and wait for the loss."""


def playing(serve: Serve) -> AbstractAsyncContextManager[str]:
    return serve_raw_sessions(lambda raw: serve(Peer(raw)))


def play(serve: Serve, use: Use = nothing, config: WorkerSessionConfig = PATIENT) -> Failure:
    """Run a session between a worker and a frontend. Returns the failure that it was lost by."""

    async def scenario() -> Failure:
        async with playing(serve) as address:
            return await attach(address, use, config)

    return run_async(scenario())


async def attach(address: str, use: Use, config: WorkerSessionConfig, peers: Peers | None = None) -> Failure:
    """Open a session to `address`, over TLS with `peers`. Returns the failure that it was lost by."""
    client = Client(WorkerSession(InstanceRecord("i", address, "m"), config, peers=peers))
    on_welcome = asyncio.Event()

    async def run() -> None:
        try:
            await client.session.run(on_welcome)
        except Failure as failure:
            client.lost = failure

    async def use_it() -> None:
        await on_welcome.wait()
        await use(client)

    async def sweep() -> None:
        while client.lost is None:
            client.check()
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        user = group.create_task(use_it())
        group.create_task(sweep())
        await run()
        if not on_welcome.is_set():
            user.cancel()
    assert client.lost is not None
    return client.lost


async def failure_of(stream: Stream) -> Reason:
    with pytest.raises(Failure) as caught:
        await stream.ended
    return caught.value.reason
