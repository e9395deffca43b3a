"""A client of an answer over gRPC that outlives its connection: see returning.py."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.clients.answers import CONTINUATION, FINISH
from tests.integration.harness.clients.requests import REQUEST_S_MAX, Request, grpc_message
from tests.integration.harness.clients.returning import RESET, Kept, Returning
from tests.integration.harness.clients.send import refusal_from
from tests.integration.harness.plane.processes import Frontend
from tests.support.raw_session import serve_connections

CONTINUE = (("x-on-disconnect", "continue"),)


OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)
"""Otherwise all channels of this process to one address would share a connection."""
PIECE_BYTES = 65_536


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """A channel with a connection of its own, and its stub."""
    options = [*CHANNEL_OPTIONS, *OWN_CONNECTION]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]


@dataclass
class Relay:
    """A way to a frontend through this process. `reset` cuts its connections by RST."""

    frontend: Frontend
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self.frontend.grpc.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        self.writers += (writer, far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, far_writer))
                group.create_task(pump(far_reader, writer))
        finally:
            far_writer.transport.abort()

    def reset(self) -> None:
        for writer in self.writers:
            if not writer.transport.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                writer.transport.abort()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes, to the end of either connection."""
    with suppress(ConnectionError):
        while data := await reader.read(PIECE_BYTES):
            writer.write(data)
            await writer.drain()


@dataclass(eq=False)
class GrpcReturningClient(Returning):
    """A client over gRPC. Like one over SSE, it keeps the failure of a stream that has begun in `error`."""

    request: Request
    metadata: tuple[tuple[str, str], ...] = field(default=CONTINUE)

    @property
    def has_stop(self) -> bool:
        return self.request.stop is not None

    @property
    def keeps_tokens(self) -> bool:
        return True

    async def ask(self, frontend: Frontend, *, events_max: int | None = None) -> "GrpcReturningClient":
        await self._run(frontend, "Generate", grpc_message(self.request), events_max)
        return self

    async def come_back(self, frontend: Frontend, *, events_max: int | None = None) -> "GrpcReturningClient":
        if self.has_ended:
            return self
        asked = inference_pb2.ResumeRequest(generation_id=self.generation_id, cursor=self.cursor)
        await self._run(frontend, "Resume", asked, events_max)
        return self

    async def go_on(self, frontend: Frontend) -> "GrpcReturningClient":
        if self.has_ended:
            return self
        message = grpc_message(self.request)
        known = self.known(self.request.n)
        if len(known) == 1:
            message.generated_token_ids.extend(known[0].token_ids)
        else:
            for one in known:
                brought = None if one.finish else one.token_ids
                message.generated_choices.add(token_ids=brought, complete=brought is None)
        assert self.seed is not None
        message.sampling.seed = self.seed
        self.ids = []
        await self._run(frontend, "Generate", message, None)
        return self

    async def _run(self, frontend: Frontend, method: str, message: Any, events_max: int | None) -> None:
        """Read the answer to the end; or some of its items, and then have the connection reset."""
        if events_max is None:
            async with connected(frontend.grpc) as stub:
                await self._read(getattr(stub, method)(message, metadata=self.metadata, timeout=REQUEST_S_MAX), None)
            return
        relay = Relay(frontend)
        async with serve_connections(relay.carry) as address, connected(address) as stub:
            call = getattr(stub, method)(message, metadata=self.metadata, timeout=REQUEST_S_MAX)
            await self._read(call, events_max)
            relay.reset()

    async def _read(self, call: Any, events_max: int | None) -> None:
        """Raises Refused for a failure before the first item."""
        self.error, count = None, 0
        try:
            head = dict(await call.initial_metadata())
            if not head:
                await call.read()  # It has failed before its head, which is then empty: raises why.
            self.generation_id = head.get("x-unbroken-generation-id", self.generation_id)
            while count != events_max and isinstance(item := await call.read(), inference_pb2.GenerateResponse):
                self._take(item)
                count += 1
        except grpc.aio.AioRpcError as error:
            assert not self.has_ended
            refused = refusal_from(error)
            if not count and (refused.error["code"] is not None or not self.generation_id):
                raise refused from None
            if refused.error["code"] is not None:
                self.error = refused.error

    def _take(self, item: inference_pb2.GenerateResponse) -> None:
        assert not self.has_ended, "an item after complete_final"
        assert item.HasField("delta") != item.complete_final, "an item must be either a delta or the marker"
        assert bool(item.cursor) == item.HasField("delta")
        self.has_ended = item.complete_final
        if item.HasField("seed"):
            self.seed = item.seed
        if item.HasField("delta"):
            self._take_delta(item.delta, item.cursor)

    def _take_delta(self, delta: inference_pb2.Delta, cursor: str) -> None:
        if delta.HasField("usage"):
            self.usage = {
                "prompt_tokens": delta.usage.prompt_tokens,
                "completion_tokens": delta.usage.completion_tokens,
            }
        choice = self.choices.setdefault(delta.choice, Kept())
        if choice.finish is not None:
            assert delta.HasField("usage"), "a choice continued after its finish reason"
            assert (list(delta.token_ids), delta.text, delta.finish_reason) == ([], "", 0)
            return
        assert delta.position == len(choice.token_ids), f"{delta.position} after {len(choice.token_ids)} tokens"
        assert cursor not in self.ids, f"{cursor} came twice"
        has_logprobs = self.request.logprobs is not None
        assert len(delta.logprobs) == (len(delta.token_ids) if has_logprobs else 0)
        self.ids.append(cursor)
        choice.token_ids += delta.token_ids
        choice.text += delta.text
        choice.logprobs += [(one.logprob, *one.top_token_ids, *one.top_logprobs) for one in delta.logprobs]
        choice.finish = FINISH[delta.finish_reason] if delta.finish_reason else None
        choice.continuation = CONTINUATION[delta.continuation]
