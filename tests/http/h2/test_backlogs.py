"""What waits on all streams of a connection together is bounded: the one with most ends, one that is read goes on."""

import asyncio
import base64
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from structlog.testing import capture_logs

from services.core.common_layers import Accept
from services.core.errors import Reason
from services.core.flow.client_flow import CONNECTION_SHARES, ClientBounds
from services.core.gate import Gate
from services.core.interface import Delta
from services.http.app import HttpApp
from services.http.grpc.routes import GrpcRoutes
from services.http.h2.bounds.backlogs import Backlogs
from services.http.h2.wire.frames import ErrorCode, window_update
from services.http.server.config import HttpConfig
from services.http.server.listener import Listen, http_server
from services.rpc.inference_service import InferenceService
from services.stubs import inference_pb2_grpc
from tests.http.grpc.support import HEADERS, OUTPUT_CALL, message, raw_client, serving_rpcs
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED, connected, connection_of
from tests.http.support import HANG, Script, Server, run, serving
from tests.support.inference import generate_request

SHARE = 20_000
BYTES_MAX = CONNECTION_SHARES * SHARE
GENERATE = "/unbroken.v1.Inference/Generate"


def config() -> HttpConfig:
    return HttpConfig(client=ClientBounds(buffer_bytes_max=SHARE))


class Holder:
    def __init__(self) -> None:
        self.why = ""

    def evict(self, why: str) -> None:
        self.why = why


def test_holder_with_most_is_evicted_first() -> None:
    backlogs, holders = Backlogs(100), [Holder() for _ in range(4)]
    for holder, size in zip(holders, (30, 40, 20, 10), strict=True):
        backlogs.set(holder, size)
    assert not any(holder.why for holder in holders), "the bound is not passed yet"

    backlogs.set(holders[3], 11)

    assert [bool(holder.why) for holder in holders] == [False, True, False, False]
    assert backlogs.size == 61


def test_what_is_taken_counts_no_more() -> None:
    backlogs, first, second = Backlogs(100), Holder(), Holder()
    for _ in range(10):
        backlogs.set(first, 90)
        backlogs.set(first, 0)
        backlogs.set(second, 90)
        backlogs.set(second, 0)

    assert not first.why
    assert not second.why
    assert backlogs.size == 0


def test_holder_that_is_alone_is_not_evicted() -> None:
    backlogs, holder = Backlogs(100), Holder()

    backlogs.set(holder, 1_000)

    assert not holder.why


def test_streams_that_are_not_read_end_and_the_one_that_is_read_goes_on() -> None:
    """Each alone is within its bound."""

    async def test() -> None:
        more = asyncio.Event()
        sizes = [SHARE - 2_000 + 10 * number for number in range(40)]
        scripts = [Script("a", more, "b"), *(Script("x" * size, HANG) for size in sizes)]

        async def pipeline(request: Any, call: Any, sink: Any) -> Any:
            return await scripts.pop(0)(request, call, sink)

        async with serving(pipeline, config=config()) as server, connected(server, window=0) as client:
            read = client.post(COMPLETIONS, STREAMED)
            client.send(window_update(read, 1 << 20))
            await client.until(lambda: client.answers[read].body)
            ids = [client.post(COMPLETIONS, STREAMED) for _ in sizes]
            backlogs = connection_of(server)._writer.backlogs
            await client.until(lambda: client.answers[ids[-1]].headers)

            kept = backlogs.size // sizes[0]
            await client.until(lambda: len([one for one in ids if client.answers[one].reset]) == len(ids) - kept)

            assert BYTES_MAX - 2 * SHARE < backlogs.size <= BYTES_MAX
            assert {client.answers[one].reset for one in ids} == {None, ErrorCode.CANCEL}
            assert server.outcomes.seen == [Reason.SLOW_CLIENT] * (len(ids) - kept)
            more.set()
            assert b'"text":"b"' in (await client.answer(read)).body

    run(test)


def test_whole_answers_that_are_not_read_are_cut() -> None:
    async def test() -> None:
        async with (
            serving(Script("x" * SHARE), config=config()) as server,
            connected(server, window=0) as client,
        ):
            ids = [client.post(COMPLETIONS, COMPLETION) for _ in range(CONNECTION_SHARES + 4)]
            await client.until(lambda: client.answers[ids[-1]].headers)
            await client.until(lambda: any(client.answers[one].reset for one in ids))

            assert connection_of(server)._writer.backlogs.size <= BYTES_MAX
            assert {client.answers[one].reset for one in ids} <= {None, ErrorCode.CANCEL, ErrorCode.ENHANCE_YOUR_CALM}

    with capture_logs() as logs:
        run(test)
    assert {entry["reason"] for entry in logs if entry["event"] == "client cut"} == {"SLOW_CLIENT"}


def test_handler_that_waits_for_a_client_is_cancelled_with_its_stream() -> None:
    async def test() -> None:
        async with serving_rpcs(config=config()) as serving, raw_client(serving, window=0) as client:
            asked = serving.service.types["StreamingOutputCallRequest"](response_parameters=[{"size": 70_000}] * 2)
            ids = [client.post(OUTPUT_CALL, message(asked.SerializeToString()), HEADERS) for _ in range(8)]
            await client.until(lambda: [one for one in ids if client.answers[one].reset])
            connection = connection_of(serving.server)

            assert {client.answers[one].reset for one in ids} == {None, ErrorCode.ENHANCE_YOUR_CALM}
            assert connection._writer.backlogs.size <= BYTES_MAX
            client.writer.close()
            while connection.tasks:
                await asyncio.sleep(0.001)
            assert connection._writer.backlogs.size == 0

    run(test)


@pytest.mark.parametrize("piece", [SHARE // 2, 70_000], ids=["in the stream", "above it"])
def test_rpcs_that_are_not_read_end_with_the_status_of_slow_clients(piece: int) -> None:
    async def test() -> None:
        gate, more = Gate(), asyncio.Event()

        async def pipeline(request: Any, call: Any, sink: Any) -> Any:
            sink.deliver(Delta(0, [1], text="a"))
            if call.request_id == "read":
                await more.wait()
                sink.deliver(Delta(1, [1], text="b"))
            else:
                sink.deliver(Delta(1, [1], text="x" * piece))
                sink.deliver(Delta(2, [1], text="x" * (SHARE // 2)))
            await asyncio.Event().wait()

        service = InferenceService(Accept(pipeline, gate), gate, bounds=config().client)
        routes = GrpcRoutes(config().client)
        routes.add(inference_pb2_grpc.add_InferenceServicer_to_server, service)
        app = HttpApp(config(), config().body_bytes_max, lambda: False)
        async with http_server(app, config(), Listen("127.0.0.1:0"), rpcs=routes) as listening:
            server: Any = Server(listening.port, None, None, None, None)  # type: ignore[arg-type]
            async with connected(server, window=0) as client:

                def ask(request_id: str) -> int:
                    asked = generate_request(request_id=request_id).SerializeToString()
                    return client.post(GENERATE, message(asked), HEADERS)

                read = ask("read")
                client.send(window_update(read, 1 << 20))
                ids = [ask(f"unread-{number}") for number in range(CONNECTION_SHARES + 8)]

                await client.until(lambda: any(client.answers[one].has_ended for one in ids))

                ended = next(client.answers[one] for one in ids if client.answers[one].has_ended)
                assert ended.trailers["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
                assert reason_in(ended.trailers) == "SLOW_CLIENT"
                assert "connection" in ended.trailers["grpc-message"]
                before = len(client.answers[read].body)
                more.set()
                await client.until(lambda: len(client.answers[read].body) > before)
                assert not client.answers[read].has_ended

    with capture_logs() as logs:
        run(test)
    assert not [entry for entry in logs if entry["log_level"] == "error"]


def reason_in(trailers: dict[str, str]) -> str:
    details = trailers["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(base64.b64decode(details + "=" * (-len(details) % 4)))
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)
