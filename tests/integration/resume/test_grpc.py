"""Streams over gRPC outlive their client's connection and their frontend, and end when somebody ends them.

What clients over both protocols have in common is tested in the other files.

| workload | nemesis | checker |
| --- | --- | --- |
| CASES | the client leaves again and again | its streams together have the undisturbed answer |
| an answer begun over HTTP | its client leaves | the text that both had is the undisturbed one |
| resumes that cannot be | – | each has its status and reason, and nothing is sent |
| a kept stream | it is cancelled, or its deadline passes | its engine stops, and nothing is left of it |
"""

import asyncio
import json
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Items, Refused
from tests.integration.harness.clients.requests import REQUEST_S_MAX, Request, grpc_message, json_body
from tests.integration.harness.clients.send import answer, refusal_from, run_together
from tests.integration.harness.metrics import wait_idle
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend, Process
from tests.integration.harness.waiting import until

SLOW = Request(protocol="grpc", prompt="Tell me of 漢字", max_tokens=60)
"""Two seconds long."""
ENDLESS = replace(SLOW, max_tokens=100_000)
SAMPLED = replace(SLOW, temperature=0.9, seed=5)
CASES: dict[str, Request] = {
    "greedy": SLOW,
    "sampled": SAMPLED,
    "choices": replace(SAMPLED, n=3),
    "log probabilities": replace(SAMPLED, logprobs=2),
    "a chat with choices and log probabilities": replace(SAMPLED, is_chat=True, n=2, logprobs=0),
}
CONTINUE = (("x-on-disconnect", "continue"),)
NOBODYS = "0" * 32
TOKENS_BEFORE = 12
"""How many tokens clients have read of an answer before something happens to it."""


def cut_short_by(whole: Answer, request: Request) -> Request:
    """The request with a stop string that ends its answer in the middle."""
    return replace(request, stop=whole.text[30:34])


@dataclass
class Client:
    """One client: what it has of one answer, over any number of streams."""

    request: Request
    items: Items = field(init=False)
    cursor: str = ""
    generation_id: str = ""
    metadata: tuple[tuple[str, str], ...] = CONTINUE
    seeds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items = Items(self.request, lambda _: None)

    @property
    def token_count(self) -> int:
        return sum(len(choice.token_ids) for choice in self.items.choices.values())

    async def generate(self, frontend: Frontend, tokens: int | None = None, timeout_s: float = REQUEST_S_MAX) -> None:
        """Ask, and read until this many tokens have come, or to the end. Then leave. Raises Refused."""
        async with connected(frontend) as stub:
            call = stub.Generate(grpc_message(self.request), metadata=self.metadata, timeout=timeout_s)
            await self._read(call, tokens)

    async def resume(self, frontend: Frontend, tokens: int | None = None) -> None:
        """Go on with the answer, likewise."""
        asked = inference_pb2.ResumeRequest(generation_id=self.generation_id, cursor=self.cursor)
        async with connected(frontend) as stub:
            await self._read(
                stub.Resume(asked, timeout=REQUEST_S_MAX), None if tokens is None else self.token_count + tokens
            )

    async def _read(self, call: Any, tokens: int | None) -> None:
        try:
            self.generation_id = dict(await call.initial_metadata()).get("x-unbroken-generation-id", self.generation_id)
            while isinstance(item := await call.read(), inference_pb2.GenerateResponse):
                self.take(item)
                if tokens is not None and self.token_count >= tokens:
                    call.cancel()
                    return
        except grpc.aio.AioRpcError as error:
            raise refusal_from(error) from None

    def take(self, item: inference_pb2.GenerateResponse) -> None:
        self.items.take(item)
        assert bool(item.cursor) == item.HasField("delta")
        self.cursor = item.cursor or self.cursor
        if item.HasField("seed"):
            self.seeds.append(item.seed)
        assert item.generation_id in ("", self.generation_id)


@asynccontextmanager
async def connected(frontend: Frontend) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(frontend.grpc, options=CHANNEL_OPTIONS) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]


@dataclass
class Pair:
    """A plane with a worker, and a second frontend, which clients come back to."""

    plane: Plane
    other: Frontend
    worker: Process

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend

    async def doomed(self, *options: str) -> Frontend:
        """Another frontend, for a test that kills it."""
        frontend = self.plane.start_frontend(*options)
        await until(lambda: frontend.has_found(self.worker))
        return frontend

    async def detached(self) -> float:
        return await self.worker.metric("unbroken_detached_requests")

    async def wait_detached(self, count: int) -> None:
        async def is_so() -> bool:
            return await self.detached() == count

        await until(is_so)

    async def wait_nothing_left(self) -> None:
        await wait_idle(self.worker, self.frontend, self.other)
        assert await self.detached() == 0


@pytest.fixture(scope="module")
def pair(start_plane: Start) -> Pair:
    plane = start_plane()

    async def started() -> Pair:
        worker = await plane.worker("--mocker-itl-ms=30")
        pair = Pair(plane, plane.start_frontend(), worker)
        await until(lambda: pair.other.has_found(worker))
        return pair

    return asyncio.run(started())


async def refused(coroutine: Awaitable[None]) -> tuple[int | str, str]:
    with pytest.raises(Refused) as caught:
        await coroutine
    return caught.value.code, caught.value.reason


# What both streams had is the answer


async def check_all(pair: Pair, disturb: Callable[[Client], Coroutine[Any, Any, None]], *, stream_count: int) -> None:
    """Compare the answers that clients have put together, over so many streams each, with the undisturbed ones."""
    cases = dict(CASES)
    whole = dict(zip(cases, await run_together(answer(pair.frontend, one) for one in cases.values()), strict=True))
    cases["a stop string"] = cut_short_by(whole["sampled"], CASES["sampled"])
    whole["a stop string"] = await answer(pair.frontend, cases["a stop string"])
    clients = {name: Client(request) for name, request in cases.items()}

    await run_together(disturb(client) for client in clients.values())

    got = {name: client.items.answer() for name, client in clients.items()}
    assert got == whole
    assert {seed for client in clients.values() for seed in client.seeds} == {SLOW.seed, SAMPLED.seed}
    assert {len(client.seeds) for client in clients.values()} == {stream_count}, "one in each stream"
    await wait_idle(pair.worker)


def test_answers_go_on_after_their_clients_left_any_number_of_times(pair: Pair) -> None:
    async def scenario() -> None:
        async def disturb(client: Client) -> None:
            await client.generate(pair.frontend, TOKENS_BEFORE)
            for frontend in (pair.other, pair.frontend):
                await client.resume(frontend, 2)
            await client.resume(pair.other)

        await check_all(pair, disturb, stream_count=4)

    asyncio.run(scenario())


def test_answer_goes_on_at_another_frontend_when_its_own_stops(pair: Pair) -> None:
    async def scenario() -> tuple[tuple[int | str, str], Answer, Answer]:
        leaving = await pair.doomed("--drain-timeout=0")
        client = Client(SAMPLED)
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(refused(client.generate(leaving)))
            await until(lambda: client.token_count >= TOKENS_BEFORE)
            leaving.signal(signal.SIGTERM)
        await client.resume(pair.other)
        return stream.result(), client.items.answer(), await answer(pair.frontend, SAMPLED)

    ended, got, whole = asyncio.run(scenario())

    assert ended == ("UNAVAILABLE", "DRAINING")
    assert got == whole


def test_answer_that_ended_while_nobody_was_there_is_complete(pair: Pair) -> None:
    async def scenario() -> tuple[Answer, Answer]:
        request = replace(CASES["choices"], max_tokens=15)
        client = Client(request)
        await client.generate(pair.frontend, TOKENS_BEFORE)
        await wait_idle(pair.worker)
        await client.resume(pair.other)
        return client.items.answer(), await answer(pair.frontend, request)

    got, whole = asyncio.run(scenario())

    assert got == whole


def test_client_that_comes_back_with_the_id_that_it_chose_gets_the_whole_answer(pair: Pair) -> None:
    async def scenario() -> tuple[Answer, Answer]:
        name = str(uuid.uuid4())
        await Client(replace(SLOW, request_id=name)).generate(pair.frontend, 1)
        client = Client(SLOW, generation_id=uuid.UUID(name).hex)
        await client.resume(pair.other)
        return client.items.answer(), await answer(pair.frontend, SLOW)

    got, whole = asyncio.run(scenario())

    assert got == whole


def test_answer_begun_over_http_goes_on_over_grpc_and_not_the_other_way_round(pair: Pair) -> None:
    async def scenario() -> tuple[str, str, dict[str, Any]]:
        request = replace(SAMPLED, protocol="stream")
        text, last_id = "", ""
        async with aiohttp.ClientSession() as session:
            url, body = f"{pair.frontend.http}/v1/completions", json_body(request)
            async with session.post(url, json=body, headers={"x-on-disconnect": "continue"}) as response:
                generation_id = response.headers["x-unbroken-generation-id"]
                async for line in response.content:
                    if line.startswith(b"id: "):
                        last_id = line[4:].decode().strip()
                    elif line.startswith(b"data: "):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        if len(text) > 5:
                            break
            async with connected(pair.other) as stub:
                asked = inference_pb2.ResumeRequest(generation_id=f"cmpl-{generation_id}", cursor=last_id)
                async for item in stub.Resume(asked):
                    text += item.delta.text
            client = Client(SLOW)
            await client.generate(pair.frontend, 1)
            async with session.get(f"{pair.other.http}/v1/streams/{client.generation_id}") as response:
                refusal = (await response.json())["error"]
        return text, (await answer(pair.frontend, request)).text, refusal

    text, whole, refusal = asyncio.run(scenario())

    assert text == whole
    assert "gRPC" in refusal["message"]


# What cannot be resumed


def test_resume_that_cannot_be_has_its_status_and_reason(pair: Pair) -> None:
    async def scenario() -> dict[str, tuple[int | str, str]]:
        client = Client(replace(SLOW, max_tokens=15))
        await client.generate(pair.frontend)

        async def resumed(**fields: str) -> tuple[int | str, str]:
            given = {"generation_id": client.generation_id} | fields
            return await refused(Client(SLOW, **given).resume(pair.other))  # type: ignore[arg-type]

        return {
            "unknown": await resumed(generation_id=NOBODYS),
            "malformed id": await resumed(generation_id="mine"),
            "malformed cursor": await resumed(cursor="12"),
            "another answer's": await resumed(cursor="3-00000000"),
            "another number of choices": await resumed(cursor="3.1-00000000"),
            "beyond the end": await resumed(cursor="16-00000000"),
        }

    assert asyncio.run(scenario()) == {
        "unknown": ("NOT_FOUND", "STREAM_NOT_FOUND"),
        "malformed id": ("INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        "malformed cursor": ("INVALID_ARGUMENT", "INVALID_ARGUMENT"),
        "another answer's": ("ABORTED", "RESUME_DIVERGED"),
        "another number of choices": ("ABORTED", "RESUME_DIVERGED"),
        "beyond the end": ("OUT_OF_RANGE", "CURSOR_BEYOND_END"),
    }


def test_answer_that_a_cursor_did_not_fit_can_still_be_resumed(pair: Pair) -> None:
    async def scenario() -> tuple[Answer, Answer]:
        client = Client(SLOW)
        await client.generate(pair.frontend, TOKENS_BEFORE)
        wrong = Client(SLOW, generation_id=client.generation_id, cursor="3-00000000")
        assert (await refused(wrong.resume(pair.other)))[1] == "RESUME_DIVERGED"
        await client.resume(pair.other)
        return client.items.answer(), await answer(pair.frontend, SLOW)

    got, whole = asyncio.run(scenario())

    assert got == whole


def test_answer_whose_grace_is_over_is_ended_and_says_so(pair: Pair) -> None:
    async def scenario() -> tuple[int | str, str]:
        client = Client(ENDLESS, metadata=(*CONTINUE, ("x-detach-grace", "200ms")))
        await client.generate(pair.frontend, TOKENS_BEFORE)
        await pair.wait_nothing_left()
        return await refused(client.resume(pair.other))

    assert asyncio.run(scenario()) == ("NOT_FOUND", "STREAM_EXPIRED")


def test_stream_that_another_client_resumes_ends(pair: Pair) -> None:
    async def scenario() -> tuple[int | str, str]:
        client = Client(ENDLESS)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(refused(client.generate(pair.frontend)))
            await until(lambda: client.token_count >= TOKENS_BEFORE)
            other = Client(ENDLESS, generation_id=client.generation_id)
            await other.resume(pair.other, 1)
        await cancel(pair.other, client.generation_id)
        await pair.wait_nothing_left()
        return first.result()

    assert asyncio.run(scenario()) == ("ABORTED", "TAKEN_OVER")


def test_answer_whose_worker_cannot_be_reached_is_asked_for_again_later(start_plane: Start) -> None:
    async def scenario() -> tuple[int | str, str]:
        plane = start_plane()
        worker = await plane.worker("--mocker-itl-ms=30")
        client = Client(SLOW)
        await client.generate(plane.frontend, TOKENS_BEFORE)
        worker.kill()
        await until(lambda: plane.frontend.events("worker lost"))
        return await refused(client.resume(plane.frontend))

    assert asyncio.run(scenario()) == ("UNAVAILABLE", "NO_WORKERS")


# What ends a kept answer


async def cancel(frontend: Frontend, request_id: str) -> int:
    async with connected(frontend) as stub:
        answered = await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
    return int(answered.cancelled)


async def cancel_over_http(frontend: Frontend, request_id: str) -> int:
    url = f"{frontend.http}/v1/requests/{request_id}/cancel"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        return int((await response.json())["cancelled"])


@pytest.mark.parametrize("end", [cancel, cancel_over_http], ids=["grpc", "http"])
def test_cancel_at_any_frontend_ends_an_answer_whose_client_has_left(pair: Pair, end: Any) -> None:
    async def scenario() -> tuple[list[int], tuple[int | str, str]]:
        client = Client(replace(ENDLESS, n=3))
        await client.generate(pair.frontend, TOKENS_BEFORE)
        await pair.wait_detached(3)
        cancelled = [await end(pair.other, client.generation_id) for _ in range(2)]
        await pair.wait_nothing_left()
        return cancelled, await refused(client.resume(pair.other))

    assert asyncio.run(scenario()) == ([1, 0], ("NOT_FOUND", "STREAM_NOT_FOUND"))


@pytest.mark.parametrize("end", [cancel, cancel_over_http], ids=["grpc", "http"])
def test_cancel_at_any_frontend_ends_an_answer_whose_client_is_connected(pair: Pair, end: Any) -> None:
    async def scenario() -> tuple[list[int], tuple[int | str, str]]:
        client = Client(replace(ENDLESS, n=3))
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(refused(client.generate(pair.frontend)))
            await until(lambda: client.token_count >= TOKENS_BEFORE)
            cancelled = [await end(pair.other, client.generation_id) for _ in range(2)]
        await pair.wait_nothing_left()
        return cancelled, stream.result()

    assert asyncio.run(scenario()) == ([1, 0], ("CANCELLED", "CANCELLED"))


def test_cancel_at_a_frontend_of_several_processes_ends_it_too(pair: Pair) -> None:
    async def scenario() -> list[int]:
        several = await pair.doomed("--processes=2")
        client = Client(ENDLESS)
        await client.generate(pair.frontend, TOKENS_BEFORE)
        await pair.wait_detached(1)
        cancelled = [await cancel(several, client.generation_id) for _ in range(2)]
        await pair.wait_nothing_left()
        several.kill()
        return cancelled

    assert asyncio.run(scenario()) == [1, 0]


def test_cancel_by_its_id_ends_a_kept_stream_for_good(pair: Pair) -> None:
    async def scenario() -> tuple[tuple[int | str, str], tuple[int | str, str]]:
        client = Client(replace(ENDLESS, request_id=uuid.uuid4().hex))
        async with asyncio.TaskGroup() as group:
            stream = group.create_task(refused(client.generate(pair.frontend)))
            await until(lambda: client.token_count >= TOKENS_BEFORE)
            assert await cancel(pair.frontend, client.generation_id) == 1
        await pair.wait_nothing_left()
        return stream.result(), await refused(client.resume(pair.other))

    assert asyncio.run(scenario()) == (("CANCELLED", "CANCELLED"), ("NOT_FOUND", "STREAM_NOT_FOUND"))


@pytest.mark.parametrize("timeout_s", [0.5, 1.371])
def test_deadline_ends_a_kept_stream_for_good(pair: Pair, timeout_s: float) -> None:
    """gRPC rounds the second one up for the server, so that the client's own timer cancels the rpc first."""

    async def scenario() -> tuple[str, tuple[int | str, str]]:
        client = Client(replace(ENDLESS, request_id=uuid.uuid4().hex))
        with pytest.raises(Refused) as caught:
            await client.generate(pair.frontend, timeout_s=timeout_s)
        await pair.wait_nothing_left()
        client.generation_id = client.request.request_id
        return str(caught.value.code), await refused(client.resume(pair.other))

    assert asyncio.run(scenario()) == ("DEADLINE_EXCEEDED", ("NOT_FOUND", "STREAM_NOT_FOUND"))


def test_request_that_is_not_kept_ends_with_its_client(pair: Pair) -> None:
    async def scenario() -> tuple[int | str, str]:
        client = Client(replace(ENDLESS, request_id=uuid.uuid4().hex), metadata=())
        async with connected(pair.frontend) as stub:
            call = stub.Generate(grpc_message(client.request))
            await call.read()
            call.cancel()
        await pair.wait_nothing_left()
        client.generation_id = client.request.request_id
        return await refused(client.resume(pair.other))

    assert asyncio.run(scenario()) == ("NOT_FOUND", "STREAM_NOT_FOUND")
