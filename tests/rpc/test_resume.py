"""InferenceService keeps answers for clients that come back, and sends each of them exactly what it does not have."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from services.core.call import Call, Cause
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.generation.cursor import CursorWriter, parse_cursor
from services.core.generation.kept import Generation
from services.core.generation.presentation import Presentation
from services.core.generation.wish import KeepConfig
from services.core.interface import Delta, Finish, Sink, Usage
from services.core.request import FinishReason, Request
from services.core.tenant import Tenant
from services.rpc.inference_service import DEFAULT_BOUNDS, InferenceService
from services.stubs import inference_pb2
from tests.support.doubles import run_async
from tests.support.inference import (
    ANSWER,
    SteppedPipeline,
    error_info,
    generate_request,
    read_all,
    serving,
    token_ids_of,
    unblocked_pipeline,
)

ID = bytes(range(16))
CONTINUE = (("x-on-disconnect", "continue"),)
KEPT = KeepConfig(on_disconnect="continue", grace_s=20)


MORE_THAN_A_WINDOW = 12_000_000
"""Bytes. Our own server keeps some of them for its client: it sends what the window allows at once."""


class Played:
    """A pipeline that delivers these deltas, with the usage at the end."""

    def __init__(self, *deltas: Delta) -> None:
        self._deltas = deltas
        self.calls: list[Call] = []

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self.calls.append(call)
        for delta in self._deltas:
            sink.deliver(delta)
        await asyncio.sleep(0)
        return ANSWER


class Flood(Played):
    """A pipeline that delivers all of it before a client can read, then its end; and notices when it is to end."""

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        finish = await super().__call__(request, call, sink)
        if call.ending.failure is not None:
            raise call.ending.failure
        sink.deliver(end(len(self._deltas), usage=finish.usage))
        return finish


class OneAnswer:
    """A finder that knows one answer."""

    def __init__(self, failure: Failure | None = None, n: int = 1) -> None:
        self._failure = failure
        self._n = n
        self.asked: list[bytes] = []
        self.generation = Generation(ID, 20, is_told=True)

    async def find(self, generation_id: bytes, tenant: Tenant) -> tuple[Presentation, Generation]:
        self.asked.append(generation_id)
        if self._failure is not None:
            raise self._failure
        presentation = Presentation(
            request=Request(model="m", token_ids=(1, 2), n=self._n),
            request_id="mine",
            endpoint="completions",
            is_streamed=False,
            counts_prompt=False,
            migration_limit=2,
            grace_s=20,
            form=b"",
        )
        return presentation, self.generation


def end(position: int, choice: int = 0, usage: Usage | None = None) -> Delta:
    return Delta(position, (), choice=choice, finish_reason=FinishReason.STOP, usage=usage)


def cursor_of(*choices: tuple[Sequence[int], bool]) -> str:
    writer = CursorWriter(len(choices))
    for choice, (token_ids, is_end) in enumerate(choices):
        writer.add(choice, 0, token_ids, is_end=is_end)
    return writer.text


def service(finder: OneAnswer | None, keep: KeepConfig | None = None) -> Any:
    return partial(InferenceService, finder=finder, keep=keep or KeepConfig())


def generate(pipeline: Any, keep: KeepConfig | None = None, metadata: Any = CONTINUE, **fields: Any) -> Any:
    """The items of an answer and its error, if it has one. `fields`: of the request."""

    async def scenario() -> Any:
        async with serving(pipeline, kind=service(OneAnswer(), keep)) as stub:
            return await read_all(stub.Generate(generate_request(**fields), metadata=metadata))

    return run_async(scenario())


def resume(
    pipeline: Any,
    finder: OneAnswer | None,
    generation_id: str = ID.hex(),
    cursor: str = "",
    bounds: ClientBounds = DEFAULT_BOUNDS,
) -> Any:
    async def scenario() -> Any:
        async with serving(pipeline, bounds, service(finder)) as stub:
            return await read_all(stub.Resume(inference_pb2.ResumeRequest(generation_id=generation_id, cursor=cursor)))

    return run_async(scenario())


# What is kept


@pytest.mark.parametrize(
    ("keep", "metadata", "grace_s"),
    [
        (None, (), None),
        (None, CONTINUE, 30),
        (None, (*CONTINUE, ("x-detach-grace", "1m")), 60),
        (KEPT, (), 20),
        (KEPT, (("x-on-disconnect", "cancel"),), None),
    ],
)
def test_metadata_and_the_frontends_default_say_whether_an_answer_is_kept(
    keep: KeepConfig | None, metadata: Any, grace_s: float | None
) -> None:
    pipeline = unblocked_pipeline([7])

    generate(pipeline, keep, metadata)

    kept = pipeline.calls[0].kept
    assert (None if kept is None else kept.generation.grace_s) == grace_s


@pytest.mark.parametrize(("request_id", "is_told"), [(ID.hex(), True), ("mine", False), ("", False)])
def test_random_request_id_is_the_id_of_the_answer_and_known_to_the_client_that_chose_it(
    request_id: str, is_told: bool
) -> None:
    told: list[tuple[bytes, bool]] = []

    async def pipeline(_request: Request, call: Call, _sink: Sink) -> Finish:
        assert call.kept is not None
        told.append((call.kept.generation.id, call.kept.generation.is_told))
        return ANSWER

    generate(pipeline, request_id=request_id)

    assert told[0][1] == is_told
    assert (told[0][0] == ID) == is_told


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ((("x-on-disconnect", "stay"),), "X-On-Disconnect"),
        ((*CONTINUE, ("x-detach-grace", "soon")), "X-Detach-Grace"),
    ],
)
def test_wish_that_cannot_be_read_is_refused_by_name(metadata: Any, param: str) -> None:
    _, error = generate(Played(), metadata=metadata)

    assert (error_info(error).reason, error_info(error).metadata["param"]) == ("INVALID_ARGUMENT", param)


def test_worker_that_is_called_directly_refuses_to_keep_an_answer() -> None:
    async def scenario() -> Any:
        async with serving(unblocked_pipeline(), kind=service(None)) as stub:
            metadata = (("x-on-disconnect", "cancel"),)
            return (
                await read_all(stub.Generate(generate_request(), metadata=CONTINUE)),
                await read_all(stub.Generate(generate_request(), metadata=metadata)),
            )

    (_, refused), (_, served) = run_async(scenario())

    assert error_info(refused).metadata["param"] == "X-On-Disconnect"
    assert served is None


# What a client is told of a kept answer


def test_client_is_told_the_id_as_soon_as_the_engine_has_begun() -> None:
    class Beginning(SteppedPipeline):
        async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
            assert call.kept is not None
            assert call.kept.generation.on_begun is not None
            call.kept.generation.on_begun()
            return await super().__call__(request, call, sink)

    async def scenario() -> tuple[Any, Generation]:
        pipeline = Beginning([7])
        async with serving(pipeline, kind=service(OneAnswer())) as stub:
            call = stub.Generate(generate_request(), metadata=CONTINUE)
            head = dict(await call.initial_metadata())  # No token has come.
            kept = pipeline.calls[0].kept
            assert kept is not None
            is_told = kept.generation.is_told
            pipeline.go.release()
            pipeline.go.release()
            await read_all(call)
        assert is_told
        assert kept.generation.on_begun is None, "or it would leave a cycle"
        return head, kept.generation

    head, generation = run_async(scenario())

    assert head["x-unbroken-generation-id"] == generation.name


def test_each_item_says_what_the_client_has_and_the_first_one_says_of_which_answer() -> None:
    pipeline = SteppedPipeline([7, 8], [9])

    async def scenario() -> list[Any]:
        async with serving(pipeline, kind=service(OneAnswer())) as stub:
            call, items = stub.Generate(generate_request(request_id=ID.hex()), metadata=CONTINUE), []
            for _ in range(2):
                pipeline.go.release()
                items.append(await call.read())
            pipeline.go.release()
            return items + (await read_all(call))[0]

    items = run_async(scenario())

    assert [item.generation_id for item in items] == [ID.hex(), "", "", ""]
    assert [item.cursor for item in items] == [
        cursor_of(([7, 8], False)),
        cursor_of(([7, 8, 9], False)),
        cursor_of(([7, 8, 9], True)),
        "",
    ]


def test_cursor_has_a_position_for_each_choice() -> None:
    deltas = [Delta(0, [5], choice=1), Delta(0, [7, 8]), end(2), end(1, 1, Usage(2, 3))]

    items, _ = generate(Played(*deltas), n=2)

    assert items[-2].cursor == cursor_of(([7, 8], True), ([5], True))


def test_answer_that_is_not_kept_has_neither_id_nor_cursor() -> None:
    async def scenario() -> Any:
        async with serving(unblocked_pipeline([7]), kind=service(OneAnswer())) as stub:
            call = stub.Generate(generate_request())
            items, _ = await read_all(call)
            return items, dict(await call.initial_metadata())

    items, head = run_async(scenario())

    assert {(item.generation_id, item.cursor) for item in items} == {("", "")}
    assert "x-unbroken-generation-id" not in head


# Resume

TOKENS = [Delta(0, [7]), Delta(1, [8]), Delta(2, [9]), end(3, usage=Usage(2, 3))]


def test_resumed_stream_has_what_follows_the_cursor() -> None:
    pipeline, finder = Played(*TOKENS), OneAnswer()

    items, error = resume(pipeline, finder, cursor=cursor_of(([7, 8], False)))

    assert error is None
    assert (items[0].delta.position, token_ids_of(items)) == (2, [9])
    assert (items[0].generation_id, items[-2].cursor) == (ID.hex(), cursor_of(([7, 8, 9], True)))
    assert items[-2].delta.usage.completion_tokens == 3
    assert items[-1].complete_final
    (call,) = pipeline.calls
    assert (call.request_id, call.migration_limit, call.is_streamed) == ("mine", 2, True)
    assert call.kept is not None
    assert (call.kept.generation, call.kept.cursor) == (finder.generation, parse_cursor("2-" + items_crc([7, 8]), ""))


@pytest.mark.parametrize(("end", "is_cut"), [(0, True), (50, True), (100, False)])
def test_client_may_leave_as_much_more_unread_as_comes_from_the_record(end: int, is_cut: bool) -> None:
    """A bug: workers send records faster than any client reads, so an answer longer than the bound cut its client."""
    size = MORE_THAN_A_WINDOW // 100
    deltas = [Delta(position, [7], "x" * size) for position in range(100)]
    finder = OneAnswer()
    finder.generation.is_resumed, finder.generation.record_ends = True, {0: end}

    items, error = resume(Flood(*deltas), finder, bounds=ClientBounds(buffer_bytes_max=MORE_THAN_A_WINDOW // 6))

    assert (error_info(error).reason if is_cut else error) == ("SLOW_CLIENT" if is_cut else None)
    assert is_cut or sum(len(item.delta.text) for item in items) == MORE_THAN_A_WINDOW


def items_crc(token_ids: Sequence[int]) -> str:
    return cursor_of((token_ids, False)).rpartition("-")[2]


@pytest.mark.parametrize("generation_id", [ID.hex(), f"chatcmpl-{ID.hex()}", f"cmpl-{ID.hex()}"])
def test_resumed_stream_without_a_cursor_has_the_whole_answer(generation_id: str) -> None:
    finder = OneAnswer()

    items, error = resume(Played(*TOKENS), finder, generation_id)

    assert error is None
    assert token_ids_of(items) == [7, 8, 9]
    assert finder.asked == [ID]


def test_usage_comes_alone_if_the_client_has_the_end_with_which_it_would_come() -> None:
    deltas = [Delta(0, [5], choice=1), Delta(0, [7]), end(1), end(1, 1, Usage(2, 2))]

    items, error = resume(Played(*deltas), OneAnswer(n=2), cursor=cursor_of(([], False), ([5], True)))

    assert error is None
    assert [item.delta.finish_reason for item in items if item.delta.choice == 1] == [0]
    assert [item.delta.usage.completion_tokens for item in items if item.delta.HasField("usage")] == [2]
    assert items[-2].cursor == cursor_of(([7], True), ([5], True))


def test_client_that_has_everything_gets_the_usage_and_the_end() -> None:
    cursor = cursor_of(([7, 8, 9], True))

    items, error = resume(Played(*TOKENS), OneAnswer(), cursor=cursor)

    assert error is None
    assert [(item.complete_final, item.cursor) for item in items] == [(False, cursor), (True, "")]
    assert (items[0].delta.finish_reason, items[0].delta.usage.completion_tokens) == (0, 3)


@pytest.mark.parametrize(
    ("cursor", "code", "reason"),
    [
        (cursor_of(([7, 99], False)), grpc.StatusCode.ABORTED, "RESUME_DIVERGED"),
        (cursor_of(([7], False), ([5], False)), grpc.StatusCode.ABORTED, "RESUME_DIVERGED"),
        (cursor_of(([7, 8, 9, 9], False)), grpc.StatusCode.OUT_OF_RANGE, "CURSOR_BEYOND_END"),
        (cursor_of(([7, 8, 9, 9], True)), grpc.StatusCode.OUT_OF_RANGE, "CURSOR_BEYOND_END"),
    ],
)
def test_cursor_that_does_not_fit_is_refused_before_anything_is_sent(
    cursor: str, code: grpc.StatusCode, reason: str
) -> None:
    pipeline = Played(*TOKENS)

    items, error = resume(pipeline, OneAnswer(), cursor=cursor)

    assert items == []
    assert error.code() is code
    assert error_info(error).reason == reason
    assert pipeline.calls[0].ending.cause is Cause.RESUME_REFUSED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"generation_id": ""}, "generation_id"),
        ({"generation_id": "mine"}, "generation_id"),
        ({"generation_id": "x" * 100_000}, "generation_id"),
        ({"cursor": "12"}, "cursor"),
        ({"cursor": "1" * 100_000}, "cursor"),
    ],
)
def test_id_or_cursor_without_the_form_of_one_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    finder = OneAnswer()

    _, error = resume(Played(), finder, **fields)

    assert (error_info(error).reason, error_info(error).metadata["param"]) == ("INVALID_ARGUMENT", param)
    assert finder.asked == []


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.STREAM_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
        (Reason.STREAM_EXPIRED, grpc.StatusCode.NOT_FOUND),
        (Reason.NO_WORKERS, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_answer_that_cannot_be_found_ends_the_rpc_with_the_reason(reason: Reason, code: grpc.StatusCode) -> None:
    _, error = resume(Played(), OneAnswer(Failure(reason, "gone")))

    assert (error.code(), error_info(error).reason) == (code, reason)


def test_answer_that_cannot_be_found_is_reported_once() -> None:
    gone, refused = Failure(Reason.STREAM_EXPIRED, "gone"), []
    kind = partial(InferenceService, on_refused=lambda *given: refused.append(given), finder=OneAnswer(gone))

    async def scenario() -> None:
        async with serving(Played(), kind=kind) as stub:
            await read_all(stub.Resume(inference_pb2.ResumeRequest(generation_id=ID.hex())))

    run_async(scenario())

    assert refused == [("resume", "", gone)]


def test_worker_that_is_called_directly_has_no_answers_to_resume() -> None:
    _, error = resume(Played(), None)

    assert error_info(error).reason == "STREAM_NOT_FOUND"


def test_bug_while_an_answer_is_looked_for_is_not_shown() -> None:
    class Broken(OneAnswer):
        async def find(self, generation_id: bytes, tenant: Tenant) -> Any:
            raise ZeroDivisionError("secret")

    _, error = resume(Played(), Broken())

    assert error_info(error).reason == "INTERNAL"
    assert "secret" not in error.details()
