"""Numbers at the ends of their ranges act as their limits, and a default gives way where a client's number is refused.

| workload | nemesis | checker |
| --- | --- | --- |
| settings whose limit is the likeliest token, HTTP and gRPC | – | the greedy answer |
| numbers that float32 lacks | – | an answer |
| completions and chats without `max_tokens`, little room | – | as many tokens as there is room for |
| `min_tokens` above the default, and above the room | – | as many tokens; INVALID_ARGUMENT with the field |
"""

import asyncio
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start, on_both_engines
from tests.integration.harness.clients.requests import REQUEST_S_MAX
from tests.integration.harness.clients.send import refusal_from
from tests.integration.harness.plane.engines import CONTEXT_LENGTH
from tests.integration.harness.plane.plane import Plane

COMPLETIONS = "/v1/completions"
PROMPT, ROOM, DEFAULT = "Say", 10, 16
FIELDS = {"model": "mocker", "ignore_eos": True}
SHORT = {"prompt": PROMPT}
WHOLE = inference_pb2.GenerateRequest(model="mocker", text=PROMPT, stop={"max_tokens": DEFAULT, "ignore_eos": True})
LONG_PROMPT = "x" * (CONTEXT_LENGTH - ROOM)
LEAST, GREATEST = 5e-324, 1.7976931348623157e308


@pytest.fixture(scope="module")
def plane(start_plane: Start) -> Plane:
    plane = start_plane()
    asyncio.run(plane.worker(f"--context-length={CONTEXT_LENGTH}", "--mocker-itl-ms=1"))
    return plane


async def post(plane: Plane, path: str = COMPLETIONS, **fields: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S_MAX)) as session,
        session.post(
            f"{plane.frontend.http}{path}", json=FIELDS | (SHORT if path == COMPLETIONS else {}) | fields
        ) as response,
    ):
        return response.status, await response.json()


async def generate(plane: Plane, message: inference_pb2.GenerateRequest) -> str:
    """The text of an answer over gRPC. Raises AioRpcError."""
    async with grpc.aio.insecure_channel(plane.frontend.grpc, options=CHANNEL_OPTIONS) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=REQUEST_S_MAX)
        text = ""
        while isinstance(item := await call.read(), inference_pb2.GenerateResponse):
            text += item.delta.text
        return text


def sampled(**sampling: float) -> inference_pb2.GenerateRequest:
    message = inference_pb2.GenerateRequest()
    message.CopyFrom(WHOLE)
    message.sampling.MergeFrom(inference_pb2.Sampling(**sampling))  # type: ignore[arg-type]
    return message


@on_both_engines
@pytest.mark.parametrize(
    "end",
    [
        {"temperature": LEAST},
        {"temperature": 1e-46},
        {"temperature": 1e-38},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": LEAST},
        {"temperature": 1.0, "top_p": 1e-38},
        {"temperature": 1.0, "top_k": 1},
    ],
)
def test_settings_whose_limit_is_the_likeliest_token_give_the_greedy_answer(plane: Plane, end: dict[str, Any]) -> None:
    async def scenario() -> None:
        _, greedy = await post(plane, temperature=0)
        status, limit = await post(plane, **end)

        assert (status, limit["choices"]) == (200, greedy["choices"])
        assert await generate(plane, sampled(**end)) == greedy["choices"][0]["text"]

    asyncio.run(scenario())


@pytest.mark.parametrize("penalty", [LEAST, 1e-46, 1e39, GREATEST])
def test_penalty_that_float32_lacks_is_answered(plane: Plane, penalty: float) -> None:
    """A bug: the worker received 0 or infinity, and refused what its frontend had accepted."""
    status, answer = asyncio.run(post(plane, temperature=1, seed=2**64 - 1, repetition_penalty=penalty, n=2))

    assert (status, answer["usage"]["completion_tokens"]) == (200, 2 * DEFAULT)


@on_both_engines
@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"prompt": LONG_PROMPT}, ROOM),
        ({"prompt": LONG_PROMPT, "max_tokens": None}, ROOM),
        ({"prompt": [LONG_PROMPT, PROMPT]}, ROOM + DEFAULT),
        ({"prompt": LONG_PROMPT, "min_tokens": ROOM}, ROOM),
        ({"min_tokens": 20}, 20),
        ({}, DEFAULT),
    ],
)
def test_default_of_max_tokens_gives_way(plane: Plane, fields: dict[str, Any], count: int) -> None:
    """A bug: a prompt that leaves less room than the default was refused for a max_tokens that nobody had given."""
    status, answer = asyncio.run(post(plane, **fields))

    assert (status, answer["usage"]["completion_tokens"]) == (200, count)
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@on_both_engines
@pytest.mark.parametrize("name", ["min_tokens", "max_tokens"])
def test_number_of_the_client_that_does_not_fit_is_refused_by_name(plane: Plane, name: str) -> None:
    async def scenario() -> None:
        status, answer = await post(plane, COMPLETIONS, **{"prompt": LONG_PROMPT, name: ROOM + 1})
        assert (status, answer["error"]["param"]) == (400, name)
        assert f"{name} is {ROOM + 1}: " in answer["error"]["message"]

        stop = inference_pb2.Stop(**{name: ROOM + 1})  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(plane, inference_pb2.GenerateRequest(model="mocker", text=LONG_PROMPT, stop=stop))
        refused = refusal_from(caught.value)
        assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
        assert f"{name} is {ROOM + 1}: " in refused.error["message"]

    asyncio.run(scenario())


def test_chat_without_max_tokens_uses_the_room(plane: Plane) -> None:
    message = {"role": "user", "content": "x" * (CONTEXT_LENGTH - 100)}

    status, answer = asyncio.run(post(plane, "/v1/chat/completions", messages=[message], min_tokens=1))

    assert status == 200, answer
    usage = answer["usage"]
    assert (status, usage["total_tokens"]) == (200, CONTEXT_LENGTH)
