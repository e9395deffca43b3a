"""Clients of kept streams come back with the cursor of the last whole event, and parse what arrived afterwards."""

import asyncio
import json
import struct
from collections.abc import Sequence

import pytest

from bench.clients.kept_streams import Answer, KeptRpc, KeptSse, KeptStream, _Connection
from bench.clients.wires import DATA, END_HEADERS, END_STREAM, HEADERS, frame
from services.stubs.inference_pb2 import Delta, FinishReason, GenerateResponse, TokenLogprobs, Usage

HEAD = b"HTTP/1.1 200 OK\r\nX-Unbroken-Generation-Id: g1\r\n\r\n"
GREETING_BYTES_MAX = 4096


def event(cursor: str, text: str, logprob: float | None = None, **fields: object) -> bytes:
    logprobs = None if logprob is None else {"token_logprobs": [logprob]}
    choice = {"text": text, "logprobs": logprobs, "finish_reason": None} | fields
    return f"id: {cursor}\ndata: {json.dumps({'choices': [choice], 'usage': None})}\n\n".encode()


USAGE = b'id: c3\ndata: {"choices":[],"usage":{"total_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def item(cursor: str, text: str = "", logprob: float | None = None, generation_id: str = "") -> bytes:
    logprobs = [] if logprob is None else [TokenLogprobs(logprob=logprob)]
    return message(
        GenerateResponse(delta=Delta(text=text, logprobs=logprobs), cursor=cursor, generation_id=generation_id)
    )


def message(response: GenerateResponse) -> bytes:
    body = response.SerializeToString()
    return frame(DATA, 0, 1, struct.pack(">BI", 0, len(body)) + body)


LAST = message(
    GenerateResponse(
        delta=Delta(finish_reason=FinishReason.FINISH_REASON_LENGTH, usage=Usage(prompt_tokens=2, completion_tokens=3)),
        complete_final=True,
    )
)
TRAILERS = frame(HEADERS, END_HEADERS | END_STREAM, 1, b"")


async def play(client: KeptStream, *connections: bytes) -> Sequence[bytes]:
    """Serve these bytes, one connection after the other, each closed after its bytes. Returns the requests."""
    requests, rest = [], list(connections)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.read(GREETING_BYTES_MAX))
        writer.write(rest.pop(0))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        await client.begin(f"{host}:{port}")
        while rest:
            assert not client.is_complete
            await client.resume(f"{host}:{port}")
    return requests


def test_sse_client_comes_back_after_its_last_whole_event() -> None:
    client = KeptSse(0, tokens=3, begun_after=2)
    cut = HEAD + event("c1", "a", -1.0) + event("c2", "b", -2.0)[:-1]
    rest = b"HTTP/1.1 200 OK\r\n\r\n" + event("c2", "b", -2.0, finish_reason="length") + USAGE + DONE

    _, second = asyncio.run(play(client, cut, rest))

    assert second.startswith(b"GET /v1/streams/g1 HTTP/1.1\r\n")
    assert b"Last-Event-ID: c1\r\n" in second
    assert client.is_complete
    assert client.resumes == 1
    assert client.answer() == Answer("ab", [-1.0, -2.0], "length", {"total_tokens": 5})


def test_rpc_client_comes_back_after_its_last_whole_message() -> None:
    client = KeptRpc(0, tokens=3, begun_after=2)
    cut = item("c1", "a", -1.0, generation_id="g1") + item("c2", "b", -2.0)[:-1]

    _, second = asyncio.run(play(client, cut, item("c2", "b", -2.0) + LAST + TRAILERS))

    assert b"/unbroken.v1.Inference/Resume" in second
    assert b"g1" in second
    assert b"c1" in second
    assert client.is_complete
    assert client.answer() == Answer("ab", [-1.0, -2.0], FinishReason.FINISH_REASON_LENGTH, (2, 3))


@pytest.mark.parametrize(
    ("client", "reply"),
    [
        (KeptSse(0, tokens=3, begun_after=2), b"HTTP/1.1 503 Service Unavailable\r\n\r\nno workers"),
        (
            KeptSse(0, tokens=3, begun_after=2),
            HEAD + event("c1", "a") + b'data: {"error":{"message":"no workers"}}\n\n',
        ),
        (KeptRpc(0, tokens=3, begun_after=2), frame(HEADERS, END_HEADERS | END_STREAM, 1, b"no workers")),
    ],
    ids=["status", "error event", "trailers"],
)
def test_error_as_the_answer_is_raised(client: KeptStream, reply: bytes) -> None:
    with pytest.raises(ConnectionError, match="no workers"):
        asyncio.run(play(client, reply))


@pytest.mark.parametrize("cut", range(1, len(DONE)))
def test_end_of_an_answer_may_come_in_two_pieces(cut: int) -> None:
    client = KeptSse(0, tokens=3, begun_after=2)
    client._connections.append([])

    async def receive() -> bool:
        connection = _Connection(client)
        for data in (HEAD + event("c1", "a") + DONE[:cut], DONE[cut:]):
            connection.data_received(data)
        return connection.ended.done()

    assert asyncio.run(receive())
    assert client.is_complete


def test_client_has_begun_well_after_as_many_arrivals_as_it_was_told() -> None:
    client = KeptRpc(0, tokens=3, begun_after=2)

    asyncio.run(play(client, item("c1", "a", generation_id="g1")))
    assert not client.has_begun_well.is_set()

    asyncio.run(play(client, item("c1", "a") + item("c2", "b")))
    assert client.has_begun_well.is_set()
    assert client.longest_gap_s > 0
