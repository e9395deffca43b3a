"""Status: a failure keeps what it says on its way through a gRPC status, and every status becomes a failure."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from services.core.errors import TRAITS, Failure, Reason
from services.http.grpc.routes import GrpcRoutes
from services.http.rpc_server import rpc_server
from services.rpc.status import (
    CHANNEL_OPTIONS,
    DETAIL_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    METADATA_BYTES_MAX,
    failure_of,
    status_of,
    time_left_s,
)
from tests.http.rpcs import serving_at
from tests.registry.support import Proxy
from tests.support.doubles import run_async


@asynccontextmanager
async def calling(end: Any) -> AsyncIterator[Any]:
    """A method of a server whose rpcs exchange bytes and end as `end` does."""

    async def handle(request: bytes, context: Any) -> bytes:
        await end(context)
        return request

    rpcs = GrpcRoutes()
    rpcs.add_registered_method_handlers("test.Test", {"Call": grpc.unary_unary_rpc_method_handler(handle)})
    async with (
        rpc_server(rpcs, "127.0.0.1:0") as server,
        grpc.aio.insecure_channel(server.addresses[0], options=CHANNEL_OPTIONS) as channel,
    ):
        yield channel.unary_unary("/test.Test/Call")


async def _fail(end: Any, payload: bytes = b"") -> grpc.aio.AioRpcError:
    async with calling(end) as call:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(payload)
    return caught.value


def cross(failure: Failure, **fields: Any) -> grpc.aio.AioRpcError:
    """The failure as a client receives it."""

    async def end(context: Any) -> None:
        context.fail(failure, **fields)

    return run_async(_fail(end))


@pytest.mark.parametrize("reason", Reason)
def test_every_failure_keeps_its_status_reason_and_detail(reason: Reason) -> None:
    error = cross(Failure(reason, "what is wrong, größer als 🎉", param="p"))
    failure = failure_of(error, otherwise=Reason.ENGINE_ERROR)

    assert error.code() is TRAITS[reason].grpc
    assert (failure.reason, failure.detail, failure.param) == (reason, "what is wrong, größer als 🎉", "p")


def test_status_details_have_reason_retryable_hint_and_retry_time() -> None:
    status = status_of(Failure(Reason.OVERLOADED, "busy", retry_after_s=0.25), request_id="r")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()

    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(retry)
    assert (info.reason, info.domain) == ("OVERLOADED", "unbroken")
    assert dict(info.metadata) == {"retryable": "true", "hint": TRAITS[Reason.OVERLOADED].hint, "request_id": "r"}
    assert retry.retry_delay.ToMilliseconds() == 250


def test_refusals_of_a_crowd_have_their_own_ids_times_and_facts() -> None:
    """What they share is encoded once."""
    sent = [("r1", "8", 1.25), ("", "8", None), ("r2", "8", 2.5), ("r2", "9", 2.5)]
    for request_id, running, retry_after_s in sent:
        failure = Failure(Reason.OVERLOADED, "full", retry_after_s=retry_after_s, metadata={"running": running})

        crossed = cross(failure, request_id=request_id)

        info = error_details_pb2.ErrorInfo()
        status = rpc_status.from_call(crossed)
        assert status is not None
        assert status.details[0].Unpack(info)
        assert (info.metadata.get("request_id", ""), info.metadata["running"]) == (request_id, running)
        assert failure_of(crossed, otherwise=Reason.INTERNAL).retry_after_s == retry_after_s


def test_status_has_no_retry_info_if_the_time_is_unknown() -> None:
    assert len(status_of(Failure(Reason.OVERLOADED, "busy")).details) == 1


def test_metadata_of_a_failure_is_kept() -> None:
    limits = {"running": "8", "engine_request_limit": "8"}
    error = cross(Failure(Reason.WORKER_AT_CAPACITY, "full", retry_after_s=2.5, metadata=limits), request_id="r")
    failure = failure_of(error, otherwise=Reason.INTERNAL)

    assert (failure.metadata, failure.retry_after_s) == (limits, 2.5)


def test_unknown_retry_time_stays_unknown() -> None:
    assert failure_of(cross(Failure(Reason.OVERLOADED, "busy")), otherwise=Reason.INTERNAL).retry_after_s is None


def test_metadata_of_a_failure_cannot_replace_the_keys_that_every_failure_has() -> None:
    given = {"retryable": "false", "hint": "none", "request_id": "another", "param": "another"}
    status = status_of(Failure(Reason.OVERLOADED, "busy", param="p", metadata=given), request_id="r")
    info = error_details_pb2.ErrorInfo()

    assert status.details[0].Unpack(info)
    hint = TRAITS[Reason.OVERLOADED].hint
    assert dict(info.metadata) == {"retryable": "true", "hint": hint, "request_id": "r", "param": "p"}


def test_metadata_of_any_size_arrives_as_far_as_it_fits() -> None:
    """With a detail and a field of the largest size, in characters with the longest encoding."""
    given = {f"key-{number}": "🎉" * 20 for number in range(100)}
    failure = Failure(Reason.OVERLOADED, "🎉" * 100_000, param="p" * 100_000, metadata=given, retry_after_s=60.0)
    crossed = failure_of(cross(failure, request_id="r" * 128), otherwise=Reason.INTERNAL)

    assert crossed.reason is Reason.OVERLOADED
    size = sum(len(key.encode()) + len(value.encode()) for key, value in crossed.metadata.items())
    assert METADATA_BYTES_MAX - 100 < size <= METADATA_BYTES_MAX


@pytest.mark.parametrize("character", ["a", "é", "漢", "🎉", "\n", "\ud800"])
def test_detail_of_any_length_arrives_cut_and_with_its_reason(character: str) -> None:
    """A bug: a model name of 100,000 characters, echoed in the detail, made the trailers too large to arrive."""
    error = cross(Failure(Reason.MODEL_NOT_FOUND, character * 100_000, param="p" * 100_000), request_id="r" * 128)
    failure = failure_of(error, otherwise=Reason.INTERNAL)

    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert failure.reason is Reason.MODEL_NOT_FOUND
    assert DETAIL_BYTES_MAX - 8 < len(failure.detail.encode()) <= DETAIL_BYTES_MAX
    assert failure.detail.endswith("…")


def test_detail_at_the_bound_is_not_cut() -> None:
    detail = "é" * (DETAIL_BYTES_MAX // 2)

    assert status_of(Failure(Reason.INTERNAL, detail)).message == detail


def test_status_without_our_details_becomes_the_reason_that_the_caller_names() -> None:
    async def end(context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "socket closed")

    failure = failure_of(run_async(_fail(end)), otherwise=Reason.DISCONNECTED)

    assert (failure.reason, failure.detail) == (Reason.DISCONNECTED, "unavailable: socket closed")


def foreign(*infos: error_details_pb2.ErrorInfo) -> status_pb2.Status:
    status = status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0], message="m")
    for info in infos:
        status.details.add().Pack(info)
    return status


@pytest.mark.parametrize(
    "info",
    [
        error_details_pb2.ErrorInfo(reason="STALLED", domain="elsewhere.example"),
        error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="unbroken"),
    ],
)
def test_error_info_of_another_domain_is_ignored(info: error_details_pb2.ErrorInfo) -> None:
    async def end(context: Any) -> None:
        status = rpc_status.to_status(foreign(info))
        await context.abort(status.code, status.details, status.trailing_metadata)

    assert failure_of(run_async(_fail(end)), otherwise=Reason.ENGINE_ERROR).reason is Reason.ENGINE_ERROR


@pytest.mark.parametrize(
    "details", [b"\xff\xff not a status", status_pb2.Status(code=3, message="contradicts").SerializeToString()]
)
def test_details_that_cannot_be_decoded_are_ignored(details: bytes) -> None:
    """A bug: DecodeError and ValueError of the status library were raised in place of a Failure."""

    async def end(context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "m", (("grpc-status-details-bin", details),))

    assert failure_of(run_async(_fail(end)), otherwise=Reason.ENGINE_ERROR).reason is Reason.ENGINE_ERROR


@pytest.mark.parametrize(("size", "fits"), [(MESSAGE_BYTES_MAX, True), (MESSAGE_BYTES_MAX + 1, False)])
def test_message_may_be_exactly_as_large_as_the_bound(size: int, fits: bool) -> None:
    async def pass_on(_: Any) -> None: ...

    async def scenario() -> bytes:
        async with calling(pass_on) as call:
            answer: bytes = await call(bytes(size))
            return answer

    if fits:
        assert len(run_async(scenario())) == size
    else:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            run_async(scenario())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_grpc_itself_never_retries_a_request() -> None:
    assert dict(CHANNEL_OPTIONS)["grpc.enable_retries"] == 0


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy", "GRPC_ADDRESS_HTTP_PROXY"])
def test_channel_connects_without_the_proxy_of_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug: the plane's own calls went to a proxy that the environment named for other programs."""
    monkeypatch.setenv(variable, "127.0.0.1:1" if variable.startswith("GRPC_") else "http://127.0.0.1:1")
    monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.0/8")

    async def scenario() -> None:
        async def pass_on(_: object) -> None:
            pass

        async with calling(pass_on) as call:
            assert await call(b"direct") == b"direct"

    run_async(scenario())


def test_every_channel_of_the_program_has_these_options() -> None:
    sources = [path.read_text() for path in (Path(__file__).parents[2] / "services").rglob("*.py")]
    channels = [
        line for source in sources for line in source.splitlines() if re.search(r"\b(in)?secure_channel\(", line)
    ]

    assert channels
    assert [line for line in channels if "OPTIONS" not in line] == []


def test_channel_prints_nothing_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """A bug: gRPC printed an error for each connection, because it could not parse an empty address of a proxy."""

    async def scenario() -> None:
        async with grpc.aio.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as channel:
            call: Any = channel.unary_unary("/any/method")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"")

    run_async(scenario())

    assert capfd.readouterr().err == ""


def test_channel_connects_to_a_peer_that_is_slow_to_accept() -> None:
    """A bug: connecting failed after 50 ms, because of an option with a misleading name."""

    async def scenario() -> None:
        async with (
            serving_at() as address,
            Proxy(address, delay_s=0.3).serving() as endpoint,
            grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) as channel,
        ):
            call: Any = channel.unary_unary("/none/None")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED, "it is the server that answers"

    run_async(scenario())


def test_client_that_pings_on_a_silent_stream_stays_connected() -> None:
    """A bug: every idle connection ended with "too many pings": the third one was too many."""
    pings = {**dict(CHANNEL_OPTIONS), "grpc.keepalive_time_ms": 1000}
    silence_s = 4.0

    async def silent(_: Any, context: Any) -> None:
        await context.write(b"first")
        await asyncio.sleep(silence_s)
        await context.write(b"last")

    async def scenario() -> list[Any]:
        rpcs = GrpcRoutes()
        rpcs.add_registered_method_handlers("s", {"Silent": grpc.unary_stream_rpc_method_handler(silent)})
        async with (
            rpc_server(rpcs, "127.0.0.1:0") as server,
            grpc.aio.insecure_channel(server.addresses[0], options=[*pings.items()]) as channel,
        ):
            method: Any = channel.unary_stream("/s/Silent")
            call = method(b"")
            return [await call.read(), await call.read()]

    assert run_async(scenario()) == [b"first", b"last"]


def test_time_left_is_never_negative_and_none_without_a_deadline() -> None:
    async def scenario() -> tuple[float | None, float | None, float | None]:
        now = asyncio.get_running_loop().time()
        return time_left_s(None), time_left_s(now - 5), time_left_s(now + 5)

    none, past, future = run_async(scenario())

    assert (none, past) == (None, 0.0)
    assert future is not None
    assert 4 < future <= 5
