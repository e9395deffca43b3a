"""Sends requests over either protocol: one alone, several at a time, or several while a fault strikes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import aiohttp
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.harness.clients.answers import Answer, Events, Items, OnTokens, Refused, whole
from tests.integration.harness.clients.requests import (
    REQUEST_S_MAX,
    Request,
    grpc_message,
    headers_of,
    json_body,
    path_of,
)
from tests.integration.harness.metrics import wait_load
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

T = TypeVar("T")


class Endpoint(Protocol):
    """The addresses of a frontend, wherever it runs."""

    @property
    def http(self) -> str:
        """The base URL."""

    @property
    def grpc(self) -> str:
        """host:port."""


def _ignore(_: int) -> None:
    pass


async def answer(frontend: Endpoint, request: Request, on_tokens: OnTokens = _ignore) -> Answer:
    """Send a request and check all rules of its stream.

    `on_tokens`: called with the number of bytes or tokens received so far. Raises Refused.
    """
    if request.protocol == "grpc":
        return await _answer_grpc(frontend.grpc, request, on_tokens)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S_MAX)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(
            f"{frontend.http}{path_of(request)}", json=json_body(request), headers=headers_of(request)
        ) as response,
    ):
        if response.status != 200:
            raise Refused(response.status, (await response.json())["error"], response.headers)
        if request.protocol == "unary":
            return whole(await response.json(), request)
        return await Events(request, on_tokens).read(response)


async def _answer_grpc(address: str, request: Request, on_tokens: OnTokens) -> Answer:
    items = Items(request, on_tokens)
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        timeout_s = REQUEST_S_MAX if request.timeout_s is None else request.timeout_s
        call = inference_pb2_grpc.InferenceStub(channel).Generate(grpc_message(request), timeout=timeout_s)
        try:
            while isinstance(item := await call.read(), inference_pb2.GenerateResponse):
                items.take(item)
        except grpc.aio.AioRpcError as error:
            raise refusal_from(error, items.received) from None
    return items.answer()


def refusal_from(error: grpc.aio.AioRpcError, received: str = "") -> Refused:
    """Return the status and its ErrorInfo in the form of the HTTP error envelope.

    Without one, the client's own library has made it, and its text names the address that the client has dialled.
    """
    status = rpc_status.from_call(error)
    fields: dict[str, Any] = {"message": "" if status is None else error.details(), "code": None}
    for detail in status.details if status is not None else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            assert info.domain == "unbroken"
            fields |= dict(info.metadata) | {"code": info.reason}
        elif detail.Unpack(retry):
            fields["retry_after_s"] = retry.retry_delay.seconds + retry.retry_delay.nanos * 1e-9
    return Refused(error.code().name, fields, received=received)


async def run_together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all coroutines at the same time; return their results in order."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


async def outcome(frontend: Frontend, request: Request, on_tokens: OnTokens = _ignore) -> Answer | Refused:
    """Return the answer or the refusal."""
    try:
        return await answer(frontend, request, on_tokens)
    except Refused as refused:
        return refused


async def refusal(frontend: Frontend, request: Request) -> Refused | None:
    """Return the refusal, or None if the request was answered."""
    got = await outcome(frontend, request)
    return got if isinstance(got, Refused) else None


async def is_answered(frontend: Frontend, request: Request) -> bool:
    return await refusal(frontend, request) is None


async def answers_under_fault(
    frontend: Endpoint,
    requests: Sequence[Request],
    fault: Callable[[], Awaitable[None]],
    worker: Process | None = None,
) -> list[Answer]:
    """Send all requests, strike when every stream has begun, and return all answers. Request ids are s0, s1, …

    `worker`: the only worker of the requests. If it is given, the fault also waits until it has those of unary clients.
    """
    begun: set[int] = set()

    def noting(number: int) -> OnTokens:
        return lambda _: begun.add(number)

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(answer(frontend, request.named(f"s{number}"), noting(number)))
            for number, request in enumerate(requests)
        ]
        await until(lambda: len(begun) == sum(request.protocol != "unary" for request in requests))
        if worker is not None:
            await wait_load(worker, sum(request.n for request in requests), 0)
        await fault()
    return [task.result() for task in tasks]


async def kill_and_wait_lost(plane: Plane, worker: Process) -> None:
    """Kill the worker and wait until the frontend has noticed."""
    worker.kill()
    await until(lambda: plane.frontend.events("worker lost", instance=worker.ready["instance_id"]))


async def undisturbed_answers(plane: Plane, requests: Sequence[Request]) -> list[Answer]:
    """Return the answers of a worker that is removed afterwards.

    That worker is fast. The workers that a fault strikes are slow, so that the fault comes before their streams end.
    """
    fast = await plane.worker("--mocker-itl-ms=1")
    undisturbed = await run_together(answer(plane.frontend, request) for request in requests)
    await kill_and_wait_lost(plane, fast)
    return undisturbed


def move_reasons(frontend: Frontend, requests: Sequence[Request]) -> list[list[str]]:
    """Return the reasons of the moves of each request of `answers_under_fault`."""
    moves = frontend.all_moves()
    return [[move["reason"] for move in moves[f"s{number}"]] for number in range(len(requests))]


@asynccontextmanager
async def background_stream(frontend: Frontend, model: str = "mocker") -> AsyncIterator[None]:
    """Keep the healthy worker busy with an endless stream, so that the next request goes to the other worker."""
    begun = asyncio.Event()
    request = Request(model=model, max_tokens=100_000)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(answer(frontend, request, lambda _: begun.set()))
        await begun.wait()
        yield
        task.cancel()
