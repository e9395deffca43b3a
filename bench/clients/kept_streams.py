"""Clients of streams that can be resumed. While they stream they only note what arrives; they parse it afterwards.

So the clients of a whole bench, which share one process, leave the processors to the system that is measured.
"""

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.clients.requests import KEPT_HEADERS, PATH
from bench.clients.wires import (
    DATA,
    END_HEADERS,
    END_STREAM,
    EVENT,
    HEADERS,
    RST_STREAM,
    SHOWN_BYTES,
    FrameCutter,
    answer_to,
    cut_messages,
    frame,
    greeting,
    grpc_request_parts,
    http_message,
    literal,
)
from services.stubs import inference_pb2

_EVENT = re.compile(rb"^id: (\S+)\r?\ndata: (\{.*\})\r?\n\r?\n", re.MULTILINE)
_GENERATION_ID = re.compile(rb"^x-unbroken-generation-id: (\S+)", re.MULTILINE | re.IGNORECASE)
_ERROR, _DONE, _CHUNKS_END = b'data: {"error"', b"data: [DONE]", b"0\r\n\r\n"
END_BYTES = len(_DONE)
"""How much of a piece may belong to an end that the next one completes."""
_OK = b"HTTP/1.1 200 "
_CONTINUE = b"x-on-disconnect", b"continue"
_STREAM_ID = 1


@dataclass
class Answer:
    """What one client got, over all its connections."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: Any = None
    usage: Any = None


class _Connection(asyncio.Protocol):
    """One of a client's connections. What comes on one that it has left is ignored."""

    def __init__(self, client: "KeptStream") -> None:
        self._client: KeptStream | None = client
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self._client is not None:
            self._client.on_data(data, self)

    def connection_lost(self, error: Exception | None) -> None:
        self.end()

    def end(self, why: bytes | None = None) -> None:
        """It is of no more use. `why`: what it said instead of an answer."""
        self._client = None
        if self.ended.done():
            return
        if why is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(ConnectionError(why.decode(errors="replace")))


class KeptStream(ABC):
    """One client, which has one connection at a time.

    `times`: when something with tokens arrived. `is_complete`: the end of the answer has arrived. `resumes`: how often
    the client came back. `has_begun_well`: something has arrived as often as `begun_after` says.
    """

    def __init__(self, begun_after: int) -> None:
        self.times: list[float] = []
        self.is_complete = False
        self.resumes = 0
        self.has_begun_well = asyncio.Event()
        self._begun_after = begun_after
        self._connections: list[list[bytes]] = []  # What has arrived on each, in pieces.

    async def begin(self, address: str) -> None:
        """Stream from the beginning until the connection ends. Raises ConnectionError for an error as the answer."""
        await self._stream(address, self._first_request())

    async def resume(self, address: str) -> None:
        """Continue at the cursor until the connection ends. Raises ConnectionError for an error as the answer."""
        self.resumes += 1
        await self._stream(address, self._resume_request())

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two arrivals."""
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)

    @abstractmethod
    def answer(self) -> Answer:
        """Parse what has arrived."""

    @abstractmethod
    def address_of(self, frontend: Any) -> str:
        """Where the frontend serves this client's protocol, as host:port."""

    @abstractmethod
    def _first_request(self) -> bytes:
        """The bytes of the first request."""

    @abstractmethod
    def _resume_request(self) -> bytes:
        """The bytes that ask for the rest of the answer."""

    @abstractmethod
    def on_data(self, data: bytes, connection: _Connection) -> None:
        """Note what has arrived; end the connection when nothing else will."""

    async def _stream(self, address: str, request: bytes) -> None:
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        self._connections.append([])
        transport, connection = await loop.create_connection(lambda: _Connection(self), host, int(port))
        try:
            transport.write(request)
            await connection.ended
        finally:
            connection.end()
            transport.close()

    def _on_tokens(self) -> None:
        self.times.append(time.monotonic())
        if len(self.times) == self._begun_after:
            self.has_begun_well.set()


class KeptSse(KeptStream):
    """A client of /v1/completions over HTTP/1.1."""

    def __init__(self, number: int, tokens: int, begun_after: int) -> None:
        super().__init__(begun_after)
        body = {
            "model": "mocker",
            "prompt": f"Prompt {number}",
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "seed": number,
            "logprobs": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._body = json.dumps(body).encode()

    def answer(self) -> Answer:
        answer = Answer()
        for _, content in self._events():
            event = json.loads(content)
            for choice in event["choices"]:
                answer.text += choice["text"]
                answer.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                answer.finish = choice["finish_reason"] or answer.finish
            answer.usage = event["usage"] or answer.usage
        return answer

    def address_of(self, frontend: Any) -> str:
        return str(frontend.http).removeprefix("http://")

    def on_data(self, data: bytes, connection: _Connection) -> None:
        pieces = self._connections[-1]
        if (not pieces and not data.startswith(_OK)) or _ERROR in data:
            connection.end(data[:SHOWN_BYTES])
            return
        tail = (pieces[-1][-END_BYTES:] if pieces else b"") + data  # An end may come in two pieces.
        pieces.append(data)
        if EVENT in data:
            self._on_tokens()
        self.is_complete |= _DONE in tail
        if tail.endswith(_CHUNKS_END):
            connection.end()

    def _first_request(self) -> bytes:
        return http_message(PATH, self._body, KEPT_HEADERS)

    def _resume_request(self) -> bytes:
        cursors = [cursor for cursor, _ in self._events()]
        found = _GENERATION_ID.search(b"".join(self._connections[0]))
        assert found is not None, "the connection broke before the head of its answer"
        last = b"Last-Event-ID: %b\r\n" % cursors[-1] if cursors else b""
        return b"GET /v1/streams/%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n" % (found[1], last)

    def _events(self) -> Iterator[tuple[bytes, bytes]]:
        """The cursor and JSON of each whole event. Relies on a server that splits no event over HTTP chunks."""
        for pieces in self._connections:
            for found in _EVENT.finditer(b"".join(pieces)):
                yield found[1], found[2]


class KeptRpc(KeptStream):
    """A client of Inference.Generate and Inference.Resume."""

    def __init__(self, number: int, tokens: int, begun_after: int) -> None:
        super().__init__(begun_after)
        self._request = inference_pb2.GenerateRequest(
            model="mocker",
            text=f"Prompt {number}",
            logprobs=0,
            sampling=inference_pb2.Sampling(temperature=0.8, seed=number),
            stop=inference_pb2.Stop(max_tokens=tokens, ignore_eos=True),
        )
        self._cutter = FrameCutter()

    def answer(self) -> Answer:
        answer = Answer()
        for item in map(_parsed, self._messages()):
            answer.text += item.delta.text
            answer.logprobs += [one.logprob for one in item.delta.logprobs]
            answer.finish = item.delta.finish_reason or answer.finish
            if item.delta.HasField("usage"):
                answer.usage = item.delta.usage.prompt_tokens, item.delta.usage.completion_tokens
        return answer

    def address_of(self, frontend: Any) -> str:
        return str(frontend.grpc)

    def on_data(self, data: bytes, connection: _Connection) -> None:
        for kind, flags, stream_id, payload in self._cutter.feed(data):
            if stream_id == 0:
                if reply := answer_to(kind, flags, payload):
                    connection.transport.write(reply)
            elif kind == DATA:
                self._connections[-1].append(payload)
                self._on_tokens()
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.is_complete = any(_parsed(one).complete_final for one in list(self._messages())[-1:])
                connection.end(None if self.is_complete else payload[:SHOWN_BYTES])

    def _first_request(self) -> bytes:
        return self._rpc("Generate", self._request.SerializeToString(), literal(*_CONTINUE))

    def _resume_request(self) -> bytes:
        messages = list(self._messages())
        generation_id = _parsed(messages[0]).generation_id
        cursor = next((cursor for one in reversed(messages) if (cursor := _parsed(one).cursor)), "")
        request = inference_pb2.ResumeRequest(generation_id=generation_id, cursor=cursor)
        return self._rpc("Resume", request.SerializeToString(), b"")

    def _rpc(self, name: str, message: bytes, fields: bytes) -> bytes:
        """The bytes of a connection that begins with this rpc."""
        self._cutter = FrameCutter()
        head, content = grpc_request_parts(f"/unbroken.v1.Inference/{name}", message)
        headers = frame(HEADERS, END_HEADERS, _STREAM_ID, head + fields)
        return greeting() + headers + frame(DATA, END_STREAM, _STREAM_ID, content)

    def _messages(self) -> Iterator[bytes]:
        """Each whole message."""
        for payloads in self._connections:
            yield from cut_messages(b"".join(payloads))[0]


def _parsed(message: bytes) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse.FromString(message)
