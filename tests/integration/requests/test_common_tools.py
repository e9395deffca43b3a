"""What common tools send is accepted, and means here what their users expect.

| workload | nemesis | checker |
| --- | --- | --- |
| requests as tools write them, HTTP and gRPC | none | the answer to the same request in plain words |
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import grpc
import pytest

from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.send import refusal_from
from tests.integration.harness.plane.processes import Frontend

PLAIN: dict[str, Any] = {"model": "mocker", "prompt": "Hi", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "mocker", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def frontend(start_plane: Start) -> Iterator[Frontend]:
    plane = start_plane()
    asyncio.run(plane.worker("--mocker-itl-ms=1", "--context-length=8192"))
    yield plane.frontend
    assert not plane.frontend.events_until_now(level="error")


async def ask(
    frontend: Frontend, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
) -> list[str]:
    """The texts of an answer. `body`: fields, or bytes as they are sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}{path}", data=data, headers=headers) as response,
    ):
        answer = await response.json()
    assert response.status == 200, answer
    return [one["message"]["content"] if "message" in one else one["text"] for one in answer["choices"]]


SPELLED = {
    "max_tokens of 16.0": (b'"max_tokens": 16.0', {"max_tokens": 16}),
    "max_tokens of 1e2": (b'"max_tokens": 1e2', {"max_tokens": 100}),
    "n of 2.0": (b'"n": 2.0', {"n": 2}),
    "top_k of -1.0": (b'"top_k": -1.0', {}),
    "a token of a bias": (
        b'"logit_bias": {"65": 100.0}, "max_tokens": 3.0',
        {"logit_bias": {"65": 100}, "max_tokens": 3},
    ),
    "stop tokens": (b'"stop_token_ids": [1.0, 2e0]', {"stop_token_ids": [1, 2]}),
    "min_tokens": (b'"min_tokens": 2.0', {"min_tokens": 2}),
    "a large seed": (
        b'"temperature": 1, "seed": 18446744073709551615.0',
        {"temperature": 1, "seed": 18446744073709551615},
    ),
    "a seed of 64 bits below 0": (
        b'"temperature": 1, "seed": -2',
        {"temperature": 1, "seed": 18446744073709551614},
    ),
    "a neutral best_of": (b'"best_of": 1.0', {}),
    "a neutral priority": (b'"priority": 0.0', {}),
    "no stop strings": (b'"stop": []', {}),
    "null everywhere": (b'"stop": null, "n": null, "logit_bias": null, "seed": null, "stream_options": null', {}),
    "a user by number": (b'"user": 5', {}),
}


@pytest.mark.parametrize(("field", "same"), SPELLED.values(), ids=SPELLED.keys())
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_number_counts_however_it_is_written(frontend: Frontend, field: bytes, same: Any, is_chat: bool) -> None:
    path, plain = ("/v1/chat/completions", CHAT) if is_chat else ("/v1/completions", PLAIN)
    own = json.dumps({name: value for name, value in plain.items() if name not in same}).encode()

    async def test() -> None:
        assert await ask(frontend, own[:-1] + b", " + field + b"}", path) == await ask(frontend, plain | same, path)

    asyncio.run(test())


def test_token_ids_of_a_prompt_may_be_written_as_fractions(frontend: Frontend) -> None:
    async def test() -> None:
        written = b'{"model": "mocker", "prompt": [72.0, 105.0], "max_tokens": 4, "logprobs": 1.0}'
        assert await ask(frontend, written) == await ask(frontend, PLAIN | {"prompt": [72, 105]})

    asyncio.run(test())


def test_byte_order_mark_is_ignored(frontend: Frontend) -> None:
    async def test() -> None:
        assert await ask(frontend, b"\xef\xbb\xbf" + json.dumps(PLAIN).encode()) == await ask(frontend, PLAIN)

    asyncio.run(test())


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_half_a_surrogate_pair_is_the_replacement_character(frontend: Frontend, is_chat: bool) -> None:
    path, plain = ("/v1/chat/completions", CHAT) if is_chat else ("/v1/completions", PLAIN)

    async def test() -> None:
        halved = json.dumps(plain).replace("Hi", "A \\ud83d").encode()
        whole = json.dumps(plain).replace("Hi", "A \\ufffd").encode()
        assert await ask(frontend, halved, path) == await ask(frontend, whole, path)

    asyncio.run(test())


def test_top_p_of_zero_takes_the_likeliest_tokens(frontend: Frontend) -> None:
    async def test() -> None:
        greedy = await ask(frontend, PLAIN | {"temperature": 0})
        sampled = {"temperature": 1.0, "max_tokens": 64}
        assert await ask(frontend, PLAIN | sampled | {"top_p": 0}) == await ask(
            frontend, PLAIN | sampled | {"temperature": 0}
        )
        assert greedy != await ask(frontend, PLAIN | {"temperature": 2.0, "max_tokens": 64})
        request = inference_pb2.GenerateRequest(model="mocker", text="Hi")
        request.sampling.temperature, request.sampling.top_p, request.stop.max_tokens = 1.0, 0.0, 4
        assert await text_of(frontend, request) == greedy[0]

    asyncio.run(test())


async def text_of(frontend: Frontend, request: inference_pb2.GenerateRequest, **options: Any) -> str:
    async with grpc.aio.insecure_channel(frontend.grpc) as channel:
        items = inference_pb2_grpc.InferenceStub(channel).Generate(request, **options)
        return "".join([item.delta.text async for item in items])


def test_seed_of_minus_one_is_another_one_each_time(frontend: Frontend) -> None:
    async def test() -> None:
        body = PLAIN | {"temperature": 2.0, "seed": -1, "max_tokens": 64}
        assert await ask(frontend, body) != await ask(frontend, body)
        assert await ask(frontend, body | {"seed": -3}) == await ask(frontend, body | {"seed": -3})

    asyncio.run(test())


def test_equal_limits_under_both_names_are_one(frontend: Frontend) -> None:
    async def test() -> None:
        both = CHAT | {"max_completion_tokens": 4}
        assert await ask(frontend, both, "/v1/chat/completions") == await ask(frontend, CHAT, "/v1/chat/completions")

    asyncio.run(test())


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_events_have_the_usage_so_far(frontend: Frontend, is_chat: bool) -> None:
    """As GuideLLM and vLLM's bench ask for it."""
    path, plain = ("/v1/chat/completions", CHAT) if is_chat else ("/v1/completions", PLAIN)
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def test() -> None:
        body = plain | {"stream": True, "stream_options": options}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{frontend.http}{path}", json=body) as response,
        ):
            lines = (await response.text()).split("\n\n")
        usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines if line.startswith("data: {")]
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == 4
        assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)

    asyncio.run(test())


CODES = {
    "an unknown model": ({"model": "gpt-9"}, "MODEL_NOT_FOUND", "model_not_found"),
    "a long prompt": ({"prompt": [65] * 8192}, "PROMPT_TOO_LONG", "context_length_exceeded"),
    "a very long prompt": ({"prompt": "x" * 900_000}, "PROMPT_TOO_LONG", "context_length_exceeded"),
    "more tokens than there is room": ({"max_tokens": 10**8}, "INVALID_ARGUMENT", "context_length_exceeded"),
    "a wrong value": ({"n": 0}, "INVALID_ARGUMENT", None),
}


@pytest.mark.parametrize(("fields", "reason", "code"), CODES.values(), ids=CODES.keys())
def test_failures_have_the_codes_that_stock_clients_look_for(
    frontend: Frontend, fields: dict[str, Any], reason: str, code: str | None
) -> None:
    async def test() -> None:
        for is_streamed in (False, True):
            body = PLAIN | fields | {"stream": is_streamed}
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{frontend.http}/v1/completions", json=body) as response,
            ):
                error = (await response.json())["error"]
            assert (error["code"], error.get("metadata", {}).get("openai_code")) == (reason, code)
            assert ("this model's maximum context length is" in error["message"]) == (reason == "PROMPT_TOO_LONG")

    asyncio.run(test())


def test_failures_have_these_codes_over_grpc_too(frontend: Frontend) -> None:
    async def test() -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text_of(frontend, inference_pb2.GenerateRequest(model="gpt-9", text="Hi"))
        refusal = refusal_from(caught.value)
        assert (refusal.reason, refusal.error["openai_code"]) == ("MODEL_NOT_FOUND", "model_not_found")

    asyncio.run(test())


TIMEOUTS = [{"X-Request-Timeout": "50ms"}, {"grpc-timeout": "50m"}, {"X-Request-Timeout": "1m", "grpc-timeout": "50m"}]


@pytest.mark.parametrize("headers", TIMEOUTS, ids=str)
def test_lowest_timeout_ends_a_request(frontend: Frontend, headers: dict[str, str]) -> None:
    async def test() -> None:
        endless = PLAIN | {"max_tokens": 4000}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{frontend.http}/v1/completions", json=endless, headers=headers) as response,
        ):
            assert (response.status, (await response.json())["error"]["code"]) == (504, "DEADLINE_EXCEEDED")

    asyncio.run(test())


def test_lowest_timeout_ends_an_rpc(frontend: Frontend) -> None:
    async def test() -> None:
        request = inference_pb2.GenerateRequest(model="mocker", text="Hi")
        request.stop.max_tokens = 4000
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await text_of(frontend, request, metadata=(("x-request-timeout", "50ms"),), timeout=60)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(test())


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1/completions", "/completions"])
def test_base_url_may_end_with_a_slash_or_lack_its_version(frontend: Frontend, path: str) -> None:
    async def test() -> None:
        assert await ask(frontend, PLAIN, path) == await ask(frontend, PLAIN)

    asyncio.run(test())


HEADERS = {
    "no type": {"Content-Type": ""},
    "plain text": {"Content-Type": "text/plain; charset=ISO-8859-1"},
    "an event stream": {"Accept": "text/event-stream"},
    "a key": {"Authorization": "Bearer none"},
    "a wait for 100": {"Expect": "100-continue"},
}


@pytest.mark.parametrize("headers", HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_clients_set_change_nothing(frontend: Frontend, headers: dict[str, str]) -> None:
    async def test() -> None:
        assert await ask(frontend, PLAIN, headers=headers) == await ask(frontend, PLAIN)

    asyncio.run(test())
