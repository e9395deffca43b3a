"""A worker that breaks the protocol: a test sends the session's messages itself, so it can send anything."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from services.discovery.client import InstanceRecord
from services.discovery.registrar import Registrar
from services.rpc.codec import card_to_wire
from services.stubs import worker_pb2
from services.worker.engines.mocker import MockerConfig, MockerEngine
from tests.support import raw_session

LEASE_S = 10
NUMBERS = count()


def honest_welcome(instance_id: str) -> worker_pb2.WorkerMessage:
    """Return the handshake of a well-behaved mocker."""
    message = worker_pb2.WorkerMessage()
    message.welcome.instance_id = instance_id
    message.welcome.card.CopyFrom(card_to_wire(MockerEngine(MockerConfig()).card))
    message.welcome.engine_request_limit = 8
    message.welcome.heartbeat.FromMilliseconds(250)
    return message


class RogueSession:
    """The rogue worker's end of one session."""

    def __init__(self, session: raw_session.RawSession, instance_id: str, answer: Sequence[int]) -> None:
        self._session = session
        self.instance_id = instance_id
        self.answer = answer

    async def send(self, message: worker_pb2.WorkerMessage | bytes) -> None:
        await self._session.send(message)

    async def read(self) -> Any:
        """Return the frontend's next message; None at the end of the session."""
        return await self._session.read()

    async def send_welcome(self) -> None:
        await self.send(honest_welcome(self.instance_id))

    async def receive_request(self) -> int:
        """Return the stream id of the first request. Waits forever if the frontend closes the session without one."""
        message = await self._session.read()
        if message is None:
            await self.wait_forever()
        (submit,) = message.submits
        stream_id: int = submit.stream_id
        return stream_id

    async def send_tokens(self, stream_id: int, position: int, token_ids: Sequence[int]) -> None:
        """Send some tokens of a stream."""
        step = worker_pb2.Step(
            stream_ids=[stream_id], positions=[position], token_counts=[len(token_ids)], token_ids=token_ids
        )
        await self.send(worker_pb2.WorkerMessage(step=step))

    async def end(self, stream_id: int, **fields: Any) -> None:
        """Send the end of a stream."""
        end = worker_pb2.StreamEnd(stream_id=stream_id, **fields)
        await self.send(worker_pb2.WorkerMessage(ends=[end]))

    def abort(self) -> None:
        self._session.abort()

    async def wait_forever(self) -> None:
        """Wait until the session is cancelled."""
        await asyncio.Event().wait()


Act = Callable[[RogueSession], Awaitable[None]]


@asynccontextmanager
async def rogue_worker(registry: str, act: Act, answer: Sequence[int]) -> AsyncIterator[str]:
    """Register a worker that runs `act` in each session; yields its id. `answer`: the correct answer's tokens."""
    instance_id = f"rogue-{next(NUMBERS)}"

    async def attach(session: raw_session.RawSession) -> None:
        await act(RogueSession(session, instance_id, answer))

    async with raw_session.serve_raw_sessions(attach) as address, asyncio.TaskGroup() as group:
        record = InstanceRecord(instance_id, address, "mocker")
        registrar = Registrar([registry], record, lease_s=LEASE_S, on_drain=lambda: None)
        registration = group.create_task(registrar.run())
        yield instance_id
        await registrar.deregister()
        registration.cancel()
