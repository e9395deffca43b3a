"""The client as the journal: with its tokens and the seed that it was told, a client continues any answer anywhere.

| workload | nemesis | checker |
| --- | --- | --- |
| CASES over HTTP | cut at every position, choices at different ones | the rest equals that of the whole answer |
| the kinds of requests that faults must not change, over gRPC | the same, at every third position | the same |
| a seeded chat over gRPC | the frontend and its workers are replaced | the same |

The rest is token ids, text, log probabilities, finish reason and usage.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.cases import CASES as GRPC_CASES
from tests.integration.harness.clients.cases import SEEDED, STOPS, with_stops
from tests.integration.harness.clients.requests import REQUEST_S_MAX, Request
from tests.integration.harness.clients.returning import Kept
from tests.integration.harness.clients.returning_grpc import GrpcReturningClient
from tests.integration.harness.clients.send import answer, run_together
from tests.integration.harness.plane.processes import Frontend

SEED = "x-unbroken-seed"
TOKENS = 14
TOGETHER_MAX = 8
"""Requests at a time: fewer than the slots of the worker."""
COMMON = {"max_tokens": TOKENS, "ignore_eos": True, "return_token_ids": True, "prompt": "Tell me of 漢字"}
SAMPLED = COMMON | {"temperature": 0.9}
CHAT = {**SAMPLED, "messages": [{"role": "user", "content": "Tell me of 漢字"}]}
del CHAT["prompt"]
CASES: dict[str, dict[str, Any]] = {
    "greedy": COMMON | {"temperature": 0},
    "sampled": SAMPLED,
    "chat with log probabilities": CHAT | {"logprobs": True, "top_logprobs": 2},
    "log probabilities": SAMPLED | {"logprobs": 2},
    "penalties": SAMPLED | {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2},
    "choices": SAMPLED | {"n": 3},
    "prompts with choices": SAMPLED | {"prompt": ["One", "Two", "Three"], "n": 2, "max_tokens": 5},
}
GUIDED = {"guided_regex": "[a-z]{3} [0-9]{4} [a-z]{3}", "ignore_eos": False}
REAL_CASES = {name: CASES[name] for name in ("greedy", "sampled", "log probabilities", "choices")}
REAL_CASES |= {"a form": SAMPLED | GUIDED}


@dataclass
class Step:
    """What one event adds to a choice."""

    token_ids: list[int]
    text: str
    logprobs: list[Any]


@dataclass
class Choice:
    """One choice as a client keeps it."""

    steps: list[Step] = field(default_factory=list)
    finish: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.token_ids]

    @property
    def logprobs(self) -> list[Any]:
        return [one for step in self.steps for one in step.logprobs]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    def text_after(self, count: int) -> str | None:
        """The text of the events after the first `count` tokens; None if an event has tokens before and after."""
        seen = 0
        for index, step in enumerate(self.steps):
            if seen == count:
                return "".join(one.text for one in self.steps[index:])
            seen += len(step.token_ids)
        return None


@dataclass
class Answer:
    """`seed`: what the client was told."""

    choices: dict[int, Choice]
    usage: dict[str, int]
    seed: str | None


def entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if logprobs is None:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*(logprobs[one] for one in ("tokens", "token_logprobs", "text_offset")), strict=True))


async def ask(session: aiohttp.ClientSession, frontend: Frontend, body: dict[str, Any]) -> Answer:
    """Read the stream of an answer to its end."""
    path = "chat/completions" if "messages" in body else "completions"
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    choices: dict[int, Choice] = {}
    usage: dict[str, int] = {}
    async with session.post(f"{frontend.http}/v1/{path}", json=asked) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                assert line.strip() in (b"", b"data: [DONE]"), line
                continue
            event = json.loads(line[6:])
            usage = event["usage"] or usage
            for one in event["choices"]:
                choice = choices.setdefault(one["index"], Choice())
                text = one["delta"].get("content", "") if "delta" in one else one["text"]
                choice.steps.append(Step(one["token_ids"], text, entries(one["logprobs"])))
                choice.finish = one["finish_reason"] or choice.finish
        return Answer(choices, usage, response.headers.get(SEED))


def cuts_of(whole: Answer, cut: int) -> list[list[int] | None]:
    """What a client has of each choice: the first ended, if there are several, and the others each cut elsewhere."""
    kept: list[list[int] | None] = []
    for index in sorted(whole.choices):
        token_ids = whole.choices[index].token_ids
        kept.append(token_ids[: max(0, min(cut + index, len(token_ids)))])
    if len(kept) > 1 and cut % 3:
        kept[cut % len(kept)] = None
    return kept


def check_rest(whole: Answer, rest: Answer, kept: Sequence[list[int] | None]) -> None:
    assert sorted(rest.choices) == [index for index, token_ids in enumerate(kept) if token_ids is not None]
    for index, got in rest.choices.items():
        known, expected = kept[index] or [], whole.choices[index]
        assert got.token_ids == expected.token_ids[len(known) :]
        assert expected.text.endswith(got.text)
        assert expected.text_after(len(known)) in (got.text, None)
        assert got.finish == expected.finish
        assert got.logprobs == expected.logprobs[len(known) :]
    completion = sum(len(whole.choices[index].token_ids) for index in rest.choices)
    assert rest.usage["completion_tokens"] == completion


async def check_every_cut(frontend: Frontend, body: dict[str, Any], *, step: int = 1) -> None:
    timeout, limit = aiohttp.ClientTimeout(REQUEST_S_MAX), asyncio.Semaphore(TOGETHER_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        whole = await ask(session, frontend, body)
        assert whole.seed is not None
        longest = max(len(choice.token_ids) for choice in whole.choices.values())
        assert longest > 3

        async def check(cut: int) -> None:
            kept = cuts_of(whole, cut)
            given: Any = kept[0] if len(kept) == 1 else kept
            async with limit:
                rest = await ask(session, frontend, body | {"seed": int(whole.seed or 0), "generated_token_ids": given})
            check_rest(whole, rest, kept)

        async with asyncio.TaskGroup() as group:
            for cut in range(0, longest + 1, step):
                group.create_task(check(cut))


@pytest.fixture(scope="module")
def mocked(start_plane: Start) -> Frontend:
    plane = start_plane()
    asyncio.run(plane.worker("--mocker-itl-ms=1"))
    return plane.frontend


@pytest.mark.parametrize("body", CASES.values(), ids=CASES)
def test_answer_continues_exactly_from_every_position(mocked: Frontend, body: dict[str, Any]) -> None:
    asyncio.run(check_every_cut(mocked, body | {"model": "mocker"}))


@pytest.mark.parametrize("body", [CASES["log probabilities"], CHAT], ids=["completion", "chat"])
def test_answer_that_is_not_streamed_continues_as_well(mocked: Frontend, body: dict[str, Any]) -> None:
    url = f"{mocked.http}/v1/{'chat/completions' if 'messages' in body else 'completions'}"
    asked = body | {"model": "mocker", "seed": 3}

    async def fetched(session: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
        async with session.post(url, json=asked | fields) as response:
            assert response.headers[SEED] == "3"
            answer: dict[str, Any] = await response.json()
        return answer

    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            whole = await fetched(session)
            [before] = whole["choices"]
            for cut in range(len(before["token_ids"]) + 1):
                rest = await fetched(session, generated_token_ids=before["token_ids"][:cut])
                [after] = rest["choices"]
                assert after["token_ids"] == before["token_ids"][cut:]
                assert entries(after["logprobs"]) == entries(before["logprobs"])[cut:]
                assert text_of(before).endswith(text_of(after))
                assert rest["usage"] == whole["usage"]

    asyncio.run(scenario())


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def test_answer_that_a_stop_string_ends_continues_exactly_from_every_position(mocked: Frontend) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession() as session:
            body = SAMPLED | {"model": "mocker", "seed": 5, "max_tokens": 40}
            text = (await ask(session, mocked, body)).choices[0].text
        await check_every_cut(mocked, body | {"stop": text[12:16]})

    asyncio.run(scenario())


@pytest.mark.model
def test_answer_of_a_real_model_continues_exactly_from_every_position(start_plane: Start) -> None:
    plane = start_plane(frontend=("--stall-ms=6000",))
    options = ("--engine=llamacpp", "--model=smollm2", "--threads=1", "--served-model-name=m")

    async def scenario() -> None:
        await plane.worker(*options)
        for body in REAL_CASES.values():
            await check_every_cut(plane.frontend, body | {"model": "m"})

    asyncio.run(scenario())


SHARE = 3
"""Over gRPC, kinds are cut at every third position, and their neighbours at the others."""


@pytest.fixture(scope="module")
def kinds(mocked: Frontend) -> dict[str, Request]:
    """The kinds of requests over gRPC."""
    seeded = asyncio.run(answer(mocked, replace(SEEDED, protocol="grpc")))
    return {**GRPC_CASES, **with_stops(seeded)}


@pytest.mark.parametrize("number", range(len((*GRPC_CASES, *STOPS))), ids=(*GRPC_CASES, *STOPS))
def test_answer_over_grpc_continues_exactly(mocked: Frontend, kinds: dict[str, Request], number: int) -> None:
    request = list(kinds.values())[number]

    async def continued(whole: GrpcReturningClient, cut: int) -> None:
        client, kept = whole.anew(), {}
        for index, choice in whole.choices.items():
            count = min(cut + index, len(choice.token_ids))
            is_over = index == 1 and cut % 2 == 1
            kept[index] = choice.token_ids if is_over else choice.token_ids[:count]
            client.choices[index] = Kept(token_ids=[*kept[index]], finish=choice.finish if is_over else None)
        await client.go_on(mocked)
        assert client.has_ended
        rest = {
            index: choice for index, choice in client.choices.items() if len(kept) == 1 or index == 0 or cut % 2 == 0
        }
        for index, got in rest.items():
            expected = whole.choices[index]
            assert (got.token_ids, got.finish) == (expected.token_ids, expected.finish)
            assert got.logprobs == expected.logprobs[len(kept[index]) :]
            assert expected.text.endswith(got.text)
        completion = sum(len(whole.choices[index].token_ids) for index in rest)
        assert client.usage is not None
        assert client.usage["completion_tokens"] == completion

    async def scenario() -> None:
        whole = await GrpcReturningClient(request).ask(mocked)
        longest = max(len(choice.token_ids) for choice in whole.choices.values())
        await run_together(continued(whole, cut) for cut in range(number % SHARE, longest + 1, SHARE))

    asyncio.run(scenario())


async def read_all(frontend: Frontend, request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    async with grpc.aio.insecure_channel(frontend.grpc, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        return [item async for item in stub.Generate(request, timeout=REQUEST_S_MAX)]


def test_client_continues_on_another_plane_over_grpc(start_plane: Start) -> None:
    """Everything that knew the answer is gone: only the client has it."""
    request = inference_pb2.GenerateRequest(model="mocker", text="Tell me", n=3)
    request.sampling.temperature = 0.9
    request.stop.ignore_eos, request.stop.max_tokens = True, 12
    tokens: list[list[int]] = [[], [], []]

    async def answered() -> tuple[list[inference_pb2.GenerateResponse], list[inference_pb2.GenerateResponse]]:
        first = start_plane()
        worker = await first.worker("--mocker-itl-ms=1")
        whole = await read_all(first.frontend, request)
        worker.kill()
        for item in whole:
            tokens[item.delta.choice] += item.delta.token_ids
        second = start_plane()
        await second.worker("--mocker-itl-ms=1")
        request.sampling.seed = whole[0].seed
        request.generated_choices.add(token_ids=tokens[0][:5])
        request.generated_choices.add(complete=True)
        request.generated_choices.add()
        return whole, await read_all(second.frontend, request)

    whole, rest = asyncio.run(answered())

    got: dict[int, list[int]] = {}
    for item in rest[:-1]:
        got.setdefault(item.delta.choice, []).extend(item.delta.token_ids)
    assert whole[0].HasField("seed")
    assert got == {0: tokens[0][5:], 2: tokens[2]}
    assert {item.delta.usage.completion_tokens for item in rest if item.delta.HasField("usage")} == {24}
