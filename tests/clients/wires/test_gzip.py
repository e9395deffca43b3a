"""gRPC's libraries compress with gzip both ways: their requests, and the large messages that they get."""

import asyncio
import json
import subprocess
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.clients.conftest import need
from tests.clients.support.serving import serving_program
from tests.clients.support.toolchains import GZIP_GO
from tests.http.grpc.interop_service import messages
from tests.http.grpc.support import Stub
from tests.support.raw_session import serve_connections

LARGE = 200_000
SMALL_BYTES_MAX = LARGE // 20
"""What LARGE zeros are compressed to at most, with all heads."""
CLIENT_S_MAX = 120.0
PIECE_BYTES = 65_536


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving_program("tests.clients.grpc_interop.server") as port:
        yield port


def test_grpc_go_compresses_both_ways(port: int) -> None:
    need(GZIP_GO.missing)

    done = subprocess.run(
        [*GZIP_GO.command(), f"127.0.0.1:{port}"], capture_output=True, text=True, timeout=CLIENT_S_MAX, check=False
    )

    assert done.returncode == 0, done.stderr
    steps = {step.pop("step"): step for step in map(json.loads, done.stdout.splitlines())}
    assert steps.keys() == {"unary", "stream", "plain"}
    for name, step in steps.items():
        assert min(step["sent"], step["received"]) > LARGE
        if name == "plain":
            assert min(step["sent_on_wire"], step["received_on_wire"]) > LARGE, "the client does not ask for it"
        else:
            assert max(step["sent_on_wire"], step["received_on_wire"]) < SMALL_BYTES_MAX


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.NoCompression], ids=["gzip", "none"])
def test_grpcio_compresses_both_ways(port: int, compression: grpc.Compression) -> None:
    types = dict(messages())

    async def test() -> Counting:
        counting = Counting(port)
        async with (
            counting.listening() as address,
            grpc.aio.insecure_channel(address, compression=compression) as channel,
        ):
            stub = Stub(channel, types)
            payload = types["Payload"](body=bytes(LARGE))
            unary = await stub.unary(types["SimpleRequest"](response_size=LARGE, payload=payload), timeout=CLIENT_S_MAX)
            assert len(unary.payload.body) == LARGE
            asked = types["StreamingOutputCallRequest"](response_parameters=[{"size": 9}, {"size": LARGE}])
            assert [len(one.payload.body) async for one in stub.output(asked, timeout=CLIENT_S_MAX)] == [9, LARGE]
        return counting

    counting = asyncio.run(test())

    if compression is grpc.Compression.Gzip:
        assert max(counting.sent, counting.received) < SMALL_BYTES_MAX
    else:
        assert min(counting.sent, counting.received) > LARGE


class Counting:
    """Passes a connection on to a port of this machine, and counts the bytes of each direction."""

    def __init__(self, port: int) -> None:
        self.sent = self.received = 0
        self._port = port

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """The address."""
        async with serve_connections(self._serve) as address:
            yield address

    async def _serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._pass_requests(reader, requests))
                while data := await answers.read(PIECE_BYTES):
                    self.received += len(data)
                    writer.write(data)
                sending.cancel()
        finally:
            requests.transport.abort()

    async def _pass_requests(self, reader: StreamReader, writer: StreamWriter) -> None:
        while data := await reader.read(PIECE_BYTES):
            self.sent += len(data)
            writer.write(data)
        writer.close()
