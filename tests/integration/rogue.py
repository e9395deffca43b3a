"""A worker that breaks the rules: the plane's protocol spoken by hand, so that anything can be sent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import grpc

from services.discovery import InstanceRecord, Registrar
from services.rpc import SERVER_OPTIONS
from services.stubs import worker_pb2
from services.wire import card_to_wire
from services.worker.engines.mocker import MockerConfig, MockerEngine
from tests.registry.support import Proxy

LEASE_S = 10
NUMBERS = count()
UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def honest_welcome(instance_id: str) -> worker_pb2.AttachResponse:
    """What a mocker would say."""
    message = worker_pb2.AttachResponse()
    message.welcome.instance_id = instance_id
    message.welcome.card.CopyFrom(card_to_wire(MockerEngine(MockerConfig()).card))
    message.welcome.engine_request_limit = 8
    message.welcome.heartbeat.FromMilliseconds(250)
    return message


class Line:
    """The rogue's end of one session."""

    def __init__(self, context: Any, instance_id: str, proxy: Proxy, answer: Sequence[int]) -> None:
        self._context = context
        self._proxy = proxy
        self.instance_id = instance_id
        self.answer = answer

    async def send(self, message: worker_pb2.AttachResponse | bytes) -> None:
        await self._context.write(message)

    async def welcome(self) -> None:
        await self.send(honest_welcome(self.instance_id))

    async def take_request(self) -> int:
        """The stream id of the first request; waits for ever when the frontend leaves without one."""
        message = await self._context.read()
        if message is grpc.aio.EOF:
            await self.hang()
        (submit,) = message.submits
        stream_id: int = submit.stream_id
        return stream_id

    async def say(self, stream_id: int, position: int, token_ids: Sequence[int]) -> None:
        """Some tokens."""
        step = worker_pb2.Step(
            stream_ids=[stream_id], positions=[position], token_counts=[len(token_ids)], token_ids=token_ids
        )
        await self.send(worker_pb2.AttachResponse(step=step))

    async def end(self, stream_id: int, **fields: Any) -> None:
        """A StreamEnd."""
        end = worker_pb2.StreamEnd(stream_id=stream_id, **fields)
        await self.send(worker_pb2.AttachResponse(ends=[end]))

    async def abort(self, code: grpc.StatusCode) -> None:
        await self._context.abort(code, "as the test wants it")

    def drop_connection(self) -> None:
        self._proxy.cut()

    async def hang(self) -> None:
        """Until the session is over."""
        await asyncio.Event().wait()


Act = Callable[[Line], Awaitable[None]]


@asynccontextmanager
async def rogue(registry: str, act: Act, answer: Sequence[int]) -> AsyncIterator[str]:
    """A registered worker that behaves like `act` in each session; its instance id. answer: the right one's tokens."""
    instance_id = f"rogue-{next(NUMBERS)}"
    server = grpc.aio.server(options=[*SERVER_OPTIONS[2:], *UNBOUNDED])
    proxy = Proxy(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")

    async def attach(_: Any, context: Any) -> None:
        await act(Line(context, instance_id, proxy, answer))

    server.add_generic_rpc_handlers((_handlers(attach),))
    await server.start()
    record = InstanceRecord(instance_id, proxy.endpoint, "mocker")
    registrar = Registrar([registry], record, lease_s=LEASE_S, on_drain=lambda: None)
    try:
        async with proxy.serving(), asyncio.TaskGroup() as group:
            registration = group.create_task(registrar.run())
            yield instance_id
            await registrar.deregister()
            registration.cancel()
            await server.stop(0)
    finally:
        await server.stop(0)


def _handlers(attach: Any) -> grpc.GenericRpcHandler:
    """Serves Attach; messages that are bytes already go as they are."""
    handler = grpc.stream_stream_rpc_method_handler(
        attach,
        request_deserializer=worker_pb2.AttachRequest.FromString,
        response_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
    )
    return grpc.method_handlers_generic_handler("unbroken.v1.Worker", {"Attach": handler})
