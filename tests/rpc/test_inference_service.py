"""InferenceService: with any pipeline, the client gets every token once, in order, and then how the request ended."""

import asyncio
import gc
import sys
from functools import partial
from typing import Any
from unittest.mock import MagicMock
from weakref import WeakSet

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.core.call import Call
from services.core.errors import Failure, Reason
from services.core.gate import Gate
from services.core.interface import Delta, Finish, Sink
from services.core.request import FinishReason, Request
from services.rpc.inference_service import InferenceService, request_id_of
from services.rpc.status import MESSAGE_BYTES_MAX
from services.runtime.tasks import wait_event
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.http.rpcs import serving_at
from tests.support.clock import WAIT_S
from tests.support.doubles import Script, run_async
from tests.support.inference import (
    ANSWER,
    SteppedPipeline,
    error_info,
    generate,
    generate_request,
    read_all,
    serving,
    token_ids_of,
    unblocked_pipeline,
)

MARKER = inference_pb2.GenerateResponse(complete_final=True)

# A whole answer


def test_answer_is_deltas_then_the_finish_with_usage_then_complete_final() -> None:
    items, error = generate(unblocked_pipeline([7, 8], [9]))

    assert error is None
    assert token_ids_of(items) == [7, 8, 9]
    finish = items[-2].delta
    assert (finish.finish_reason, finish.position + len(finish.token_ids)) == (inference_pb2.FINISH_REASON_STOP, 3)
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (2, 3)
    assert items[-1] == MARKER
    assert not any(item.complete_final for item in items[:-1])


def test_answer_without_tokens_is_a_finish_and_complete_final() -> None:
    items, error = generate(unblocked_pipeline())

    assert error is None
    assert [item.HasField("delta") for item in items] == [True, False]


def test_continued_answer_starts_after_the_generated_tokens_of_its_request() -> None:
    items, _ = generate(unblocked_pipeline([9]), generated_token_ids=[7, 8])

    assert items[0].delta.position == 2
    assert items[-2].delta.position + len(items[-2].delta.token_ids) == 3


def test_every_delta_and_the_finish_have_the_number_of_the_choice() -> None:
    items, _ = generate(unblocked_pipeline([9]), choice=3)

    assert {item.delta.choice for item in items[:-1]} == {3}


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
def test_only_the_first_item_has_the_seed_that_was_used(seed: int | None) -> None:
    class Telling(SteppedPipeline):
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            call.told.seed = seed
            return await super().__call__(request, call, sink)

    async def scenario() -> list[Any]:
        pipeline = Telling([7], [8], [9])
        async with serving(pipeline) as stub:
            call, items = stub.Generate(generate_request()), []
            for _ in range(4):
                pipeline.go.release()
                items.append(await call.read())
            return items + (await read_all(call))[0]

    first, *others = run_async(scenario())

    assert (first.seed if first.HasField("seed") else None) == seed
    assert len(others) == 4
    assert not any(item.HasField("seed") for item in others)


def test_each_token_is_sent_when_it_arrives() -> None:
    async def scenario() -> list[int]:
        pipeline = SteppedPipeline([7], [8])
        seen = []
        async with serving(pipeline) as stub:
            call = stub.Generate(generate_request())
            for _ in range(2):
                pipeline.go.release()  # The next token exists only once the one before has arrived.
                seen += (await call.read()).delta.token_ids
            pipeline.go.release()
            await read_all(call)
        return seen

    assert run_async(scenario()) == [7, 8]


# Failures


def test_failure_before_the_first_token_is_the_status_with_its_reason() -> None:
    items, error = generate(Script([Reason.NO_WORKERS]), request_id="r-1")

    assert items == []
    assert error is not None
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    info = error_info(error)
    assert (info.reason, info.domain, info.metadata["request_id"]) == ("NO_WORKERS", "unbroken", "r-1")
    assert info.metadata["retryable"] == "true"


def test_status_has_the_retry_time_if_it_is_known() -> None:
    failure = Failure(Reason.OVERLOADED, "busy", retry_after_s=1.5)
    _, error = generate(unblocked_pipeline(outcome=failure))

    status = rpc_status.from_call(error)
    retry = error_details_pb2.RetryInfo()
    assert status is not None
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500


def test_tokens_that_precede_a_failure_arrive_before_it() -> None:
    burst = [list(range(start, start + 50)) for start in range(0, 5000, 50)]
    items, error = generate(unblocked_pipeline(*burst, outcome=Failure(Reason.DISCONNECTED, "gone")))

    assert token_ids_of(items) == list(range(5000))
    assert error_info(error).reason == "DISCONNECTED"
    assert not any(item.complete_final or item.delta.finish_reason for item in items)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"guided": inference_pb2.Guided()}, "guided"),
        ({"session_id": "s"}, "session_id"),
        ({"priority": -1}, "priority"),
        ({"request_id": "two words"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
    ],
)
def test_field_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    script = Script()
    _, error = generate(script, **fields)

    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).metadata["param"] == name
    assert name in (error.details() or "")
    assert script.requests == []


def test_huge_request_id_is_refused_like_any_other_invalid_one() -> None:
    """An echo of it would not fit into the trailers, and the client would see a status without ErrorInfo."""
    _, error = generate(Script(), request_id="x" * 100_000)

    assert error_info(error).metadata["param"] == "request_id"


@pytest.mark.parametrize(("given", "told"), [("r-1", "r-1"), ("two words", "")])
def test_request_refused_before_the_pipeline_is_reported_with_its_id(given: str, told: str) -> None:
    refused: list[tuple[str, str, Reason]] = []

    def on_refused(endpoint: str, request_id: str, failure: Failure) -> None:
        refused.append((endpoint, request_id, failure.reason))

    async def scenario() -> None:
        async with serving(Script(), kind=partial(InferenceService, on_refused=on_refused)) as stub:
            await read_all(stub.Generate(generate_request(request_id=given, session_id="s")))

    run_async(scenario())

    assert refused == [("generate", told, Reason.INVALID_ARGUMENT)]


def test_n_of_one_equals_the_default() -> None:
    _, error = generate(unblocked_pipeline([7]), n=1)

    assert error is None


def test_failed_request_does_not_affect_the_next() -> None:
    async def scenario() -> list[int]:
        async with serving(Script([Reason.INTERNAL], [7])) as stub:
            _, error = await read_all(stub.Generate(generate_request()))
            assert error is not None
            with_usage = await read_all(stub.Generate(generate_request(session_id="s")))
            assert with_usage[1] is not None
        async with serving(unblocked_pipeline([7])) as stub:
            items, _ = await read_all(stub.Generate(generate_request()))
            return token_ids_of(items)

    assert run_async(scenario()) == [7]


def test_bug_in_the_writer_ends_the_request_and_does_not_count_as_a_hang_up() -> None:
    """The last delta has a string that is not valid Unicode, so the task group of the writer fails during its exit."""

    async def pipeline(request: Request, call: Call, sink: Sink) -> Finish:
        sink.deliver(Delta(0, [7], text="\ud800"))
        return ANSWER

    _, error = generate(pipeline, request_id="r-1")

    assert error_info(error).reason == "INTERNAL"
    assert "r-1" in (error.details() or "" if error else "")


# The call


def test_request_without_an_id_gets_one() -> None:
    pipeline = unblocked_pipeline()
    generate(pipeline)

    assert request_id_of("") != request_id_of("")
    assert len(pipeline.calls[0].request_id) == 32


def test_request_keeps_its_own_id() -> None:
    pipeline = unblocked_pipeline()
    generate(pipeline, request_id="a-Z_0.9:x")

    assert pipeline.calls[0].request_id == "a-Z_0.9:x"


@pytest.mark.parametrize("timeout_s", [None, 500.0])
def test_deadline_of_the_client_becomes_that_of_the_call(timeout_s: float | None) -> None:
    async def scenario() -> float | None:
        pipeline = unblocked_pipeline()
        async with serving(pipeline) as stub:
            await read_all(stub.Generate(generate_request(), timeout=timeout_s))
        deadline = pipeline.calls[0].deadline
        return None if deadline is None else deadline - asyncio.get_running_loop().time()

    left_s = run_async(scenario())

    assert (left_s is None) == (timeout_s is None)
    assert left_s is None or 400.0 < left_s < 510.0


def test_deadline_that_passes_ends_the_pipeline() -> None:
    async def scenario() -> grpc.StatusCode:
        pipeline = SteppedPipeline()
        async with serving(pipeline) as stub:
            _, error = await read_all(stub.Generate(generate_request(), timeout=0.3))
            await pipeline.cancelled.wait()
        assert error is not None
        return error.code()

    assert run_async(scenario()) is grpc.StatusCode.DEADLINE_EXCEEDED


# Hanging up


@pytest.mark.parametrize("tokens_read", [0, 1])
def test_client_that_hangs_up_cancels_the_pipeline(tokens_read: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[str]:
        pipeline = SteppedPipeline([7], [8])
        async with serving(pipeline) as stub:
            call = stub.Generate(generate_request())
            await pipeline.began.wait()
            for _ in range(tokens_read):
                pipeline.go.release()
                await call.read()
            call.cancel()
            await pipeline.cancelled.wait()
            return [record.message for record in caplog.records if record.name.startswith("grpc")]

    assert run_async(scenario()) == []


@pytest.mark.parametrize(("given", "limit"), [((), None), ((("x-migration-limit", "2"),), 2)])
def test_metadata_sets_the_migration_limit_of_a_request(given: Any, limit: int | None) -> None:
    async def scenario() -> int | None:
        pipeline = unblocked_pipeline([7])
        async with serving(pipeline) as stub:
            await read_all(stub.Generate(generate_request(), metadata=given))
        return pipeline.calls[0].migration_limit

    assert run_async(scenario()) == limit


@pytest.mark.parametrize(
    ("metadata", "timeout_s", "expected_s"),
    [
        ((("x-request-timeout", "30s"),), None, 30),
        ((("x-request-timeout", "30s"),), 5, 5),
        ((("x-request-timeout", "5"),), 30, 5),
        ((("x-request-timeout", "30"), ("x-request-timeout", "5")), None, 5),
    ],
)
def test_metadata_lowers_the_deadline_of_a_request(metadata: Any, timeout_s: float | None, expected_s: float) -> None:
    async def scenario() -> float:
        pipeline = unblocked_pipeline([7])
        async with serving(pipeline) as stub:
            await read_all(stub.Generate(generate_request(), metadata=metadata, timeout=timeout_s))
        deadline = pipeline.calls[0].deadline
        assert deadline is not None
        return deadline - asyncio.get_running_loop().time()

    assert expected_s * 0.6 < run_async(scenario()) < expected_s * 1.02


@pytest.mark.parametrize("given", ["soon", "1e999", "nan"])
def test_timeout_that_is_no_duration_is_refused_by_name(given: str) -> None:
    async def scenario() -> grpc.aio.AioRpcError | None:
        async with serving(Script()) as stub:
            return (await read_all(stub.Generate(generate_request(), metadata=(("x-request-timeout", given),))))[1]

    assert error_info(run_async(scenario())).metadata["param"] == "X-Request-Timeout"


def test_migration_limit_that_is_no_number_is_refused_by_name() -> None:
    async def scenario() -> grpc.aio.AioRpcError | None:
        async with serving(Script()) as stub:
            return (await read_all(stub.Generate(generate_request(), metadata=(("x-migration-limit", "many"),))))[1]

    assert error_info(run_async(scenario())).metadata["param"] == "X-Migration-Limit"


# Cancel


def test_cancel_by_id_ends_the_stream_with_cancelled() -> None:
    async def scenario() -> tuple[list[int], grpc.aio.AioRpcError | None]:
        pipeline = SteppedPipeline([5])
        pipeline.go.release()
        async with serving(pipeline) as stub:
            call = stub.Generate(generate_request(request_id="mine"))
            await call.read()
            answers = [await stub.Cancel(inference_pb2.CancelRequest(request_id=name)) for name in ("another", "mine")]
            _, error = await read_all(call)
        await pipeline.cancelled.wait()
        return [answer.cancelled for answer in answers], error

    cancelled, error = run_async(scenario())
    assert cancelled == [0, 1]
    assert error is not None
    assert error.code() is grpc.StatusCode.CANCELLED
    assert error_info(error).reason == "CANCELLED"


@pytest.mark.parametrize("name", ["", "a b", "x" * 129])
def test_cancel_with_an_invalid_request_id_is_an_invalid_argument(name: str) -> None:
    async def scenario() -> grpc.aio.AioRpcError:
        async with serving(SteppedPipeline()) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Cancel(inference_pb2.CancelRequest(request_id=name))
        return caught.value

    error = run_async(scenario())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error_info(error).metadata["param"] == "request_id"


@pytest.mark.parametrize("is_refused", [True, False], ids=["refusal", "answer"])
def test_request_leaves_nothing_to_the_garbage_collector(is_refused: bool) -> None:
    """A bug: during an overload, garbage collections stopped every stream for a tenth of a second."""
    sinks: WeakSet[Sink] = WeakSet()

    async def pipeline(_request: Request, _call: Call, sink: Sink) -> Finish:
        sinks.add(sink)
        if is_refused:
            raise Failure(Reason.OVERLOADED, "full")
        sink.deliver(Delta(0, [7]))
        return Finish(FinishReason.STOP)

    async def scenario() -> int:
        async with serving(pipeline) as stub:
            for _ in range(3):
                _, error = await read_all(stub.Generate(generate_request()))
                assert (error is not None and error_info(error).reason == "OVERLOADED") is is_refused
            return len(sinks)

    gc.disable()
    try:
        assert run_async(scenario()) <= 1, "that of the last one, whose rpc may not have ended here"
    finally:
        gc.enable()


def test_answer_does_not_hold_the_message_of_its_request() -> None:
    message = generate_request()

    async def scenario() -> int:
        begun, is_over = asyncio.Event(), asyncio.Event()

        async def pipeline(_request: Request, _call: Call, _sink: Sink) -> Finish:
            begun.set()
            await is_over.wait()
            raise Failure(Reason.CANCELLED, "over")

        context: Any = MagicMock(has_room=True, time_remaining=lambda: None, invocation_metadata=tuple)
        before = sys.getrefcount(message)
        async with asyncio.TaskGroup() as group:
            group.create_task(InferenceService(pipeline, Gate()).Generate(message, context))
            assert await wait_event(begun, WAIT_S)
            held = sys.getrefcount(message) - before
            is_over.set()
        return held

    assert run_async(scenario()) == 0


# Requests that are no messages


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        (b"\xff\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (bytes(MESSAGE_BYTES_MAX + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, "BODY_TOO_LARGE"),
    ],
    ids=["undecodable", "too large"],
)
@pytest.mark.parametrize("method", ["Generate", "Cancel"])
def test_request_that_cannot_be_read_is_the_clients_fault_and_says_so(
    method: str, message: bytes, code: grpc.StatusCode, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> grpc.aio.AioRpcError:
        service = (inference_pb2_grpc.add_InferenceServicer_to_server, InferenceService(Script(), Gate()))
        unbounded = [("grpc.max_send_message_length", -1)]
        async with serving_at(service) as address, grpc.aio.insecure_channel(address, options=unbounded) as channel:
            call: Any = channel.unary_stream(f"/unbroken.v1.Inference/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message).read()
            return caught.value

    error = run_async(scenario())

    assert error.code() is code
    assert error_info(error).reason == reason
    assert not caplog.records
