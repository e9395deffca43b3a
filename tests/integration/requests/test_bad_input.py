"""A bad request fails with the right status and says what to change, and affects no other request.

| workload | nemesis | checker |
| --- | --- | --- |
| a good request meanwhile and one after it | each bad one below, HTTP and gRPC | status, reason, field; `Answer` |
"""

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc
import pytest

from services.rpc.status import CHANNEL_OPTIONS, MESSAGE_BYTES_MAX
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.answers import Answer, Refused
from tests.integration.harness.clients.requests import Request, grpc_message
from tests.integration.harness.clients.send import answer, refusal_from
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend

CONTEXT = 256
HUGE = 10**9
GOOD = {"model": "mocker", "prompt": "Hi", "max_tokens": 4}
CHAT = {"model": "mocker", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
MIB = 1024 * 1024
BODY_BYTES = 100 * MIB


@dataclass(frozen=True)
class Setup:
    """A plane with one worker, and its answer to a good request."""

    plane: Plane
    undisturbed: Answer

    @property
    def frontend(self) -> Frontend:
        return self.plane.frontend


@pytest.fixture(scope="module")
def prepared(start_plane: Start) -> Iterator[Setup]:
    plane = start_plane()

    async def start() -> Answer:
        await plane.worker(f"--context-length={CONTEXT}", "--mocker-itl-ms=1")
        return await answer(plane.frontend, Request())

    yield Setup(plane, asyncio.run(start()))
    assert not plane.frontend.events_until_now(level="error"), "bad input was logged as an error of the frontend"


async def check_unharmed(prepared: Setup, bad_request: Any) -> None:
    """Check that a concurrent good request and the next one are answered as usual."""
    async with asyncio.TaskGroup() as group:
        meanwhile = group.create_task(answer(prepared.frontend, Request()))
        await bad_request
    assert meanwhile.result() == prepared.undisturbed
    assert await answer(prepared.frontend, Request()) == prepared.undisturbed


# HTTP


async def post(frontend: Frontend, data: Any, path: str = "/v1/completions") -> None:
    """Send a request. Raises Refused unless it is accepted."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{frontend.http}{path}", data=data) as response,
    ):
        if response.status != 200:
            raise Refused(response.status, (await response.json())["error"], response.headers)


async def check_http(frontend: Frontend, data: Any, path: str, status: int, code: str, param: str | None) -> None:
    with pytest.raises(Refused) as caught:
        await post(frontend, data, path)
    error = caught.value.error
    assert (caught.value.code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["retryable"] is False
    assert caught.value.headers["X-Request-Id"] == error["request_id"]


HTTP = {
    "unknown model": (GOOD | {"model": "gpt-9"}, 404, "MODEL_NOT_FOUND", "model"),
    "no model": ({"prompt": "Hi"}, 400, "INVALID_ARGUMENT", "model"),
    "empty model": (GOOD | {"model": ""}, 400, "INVALID_ARGUMENT", "model"),
    "no prompt": ({"model": "mocker"}, 400, "INVALID_ARGUMENT", "prompt"),
    "empty prompt": (GOOD | {"prompt": ""}, 400, "INVALID_ARGUMENT", "prompt"),
    "empty list of prompts": (GOOD | {"prompt": []}, 400, "INVALID_ARGUMENT", "prompt"),
    "prompts of two kinds": (GOOD | {"prompt": ["a", 1]}, 400, "INVALID_ARGUMENT", "prompt"),
    "too long prompt": (GOOD | {"prompt": "x" * CONTEXT}, 400, "PROMPT_TOO_LONG", "prompt"),
    "a prompt that is far too long": (GOOD | {"prompt": "x" * 900_000}, 400, "PROMPT_TOO_LONG", "prompt"),
    "far too many tokens": (GOOD | {"prompt": [1] * 250_000}, 400, "PROMPT_TOO_LONG", "prompt"),
    "too many stop tokens": (GOOD | {"stop_token_ids": [1] * 257}, 400, "INVALID_ARGUMENT", "stop_token_ids"),
    "too many biases": (
        GOOD | {"logit_bias": {str(token): 1 for token in range(1025)}},
        400,
        "INVALID_ARGUMENT",
        "logit_bias",
    ),
    "unknown token": (GOOD | {"prompt": [1, 99_999]}, 400, "INVALID_ARGUMENT", "prompt"),
    "prompt of another type": (GOOD | {"prompt": {"text": "Hi"}}, 400, "INVALID_ARGUMENT", "prompt"),
    "negative max_tokens": (GOOD | {"max_tokens": -2}, 400, "INVALID_ARGUMENT", "max_tokens"),
    "no tokens at all": (GOOD | {"max_tokens": 0}, 400, "INVALID_ARGUMENT", "max_tokens"),
    "huge max_tokens": (GOOD | {"max_tokens": HUGE}, 400, "INVALID_ARGUMENT", "max_tokens"),
    "max_tokens beyond any integer": (GOOD | {"max_tokens": 2**70}, 400, "INVALID_ARGUMENT", "max_tokens"),
    "fractional max_tokens": (GOOD | {"max_tokens": 1.5}, 400, "INVALID_ARGUMENT", "max_tokens"),
    "huge temperature": (GOOD | {"temperature": 1e308}, 400, "INVALID_ARGUMENT", "temperature"),
    "negative temperature": (GOOD | {"temperature": -1}, 400, "INVALID_ARGUMENT", "temperature"),
    "temperature in words": (GOOD | {"temperature": "hot"}, 400, "INVALID_ARGUMENT", "temperature"),
    "top_p below 0": (GOOD | {"top_p": -0.1}, 400, "INVALID_ARGUMENT", "top_p"),
    "seed of more than 64 bits": (GOOD | {"seed": 2**64}, 400, "INVALID_ARGUMENT", "seed"),
    "empty stop string": (GOOD | {"stop": ""}, 400, "INVALID_ARGUMENT", "stop"),
    "too many stop strings": (GOOD | {"stop": ["x"] * 65}, 400, "INVALID_ARGUMENT", "stop"),
    "bias of no token": (GOOD | {"logit_bias": {"x": 1}}, 400, "INVALID_ARGUMENT", "logit_bias"),
    "no answers": (GOOD | {"n": 0}, 400, "INVALID_ARGUMENT", "n"),
    "too many answers": (GOOD | {"n": 65}, 400, "INVALID_ARGUMENT", "n"),
    "too many log probabilities": (GOOD | {"logprobs": 21}, 400, "INVALID_ARGUMENT", "logprobs"),
    "log probabilities below 0": (GOOD | {"logprobs": -1}, 400, "INVALID_ARGUMENT", "logprobs"),
    "a grammar that the engine does not support": (
        GOOD | {"guided_grammar": "root ::= x"},
        400,
        "INVALID_ARGUMENT",
        "guided_grammar",
    ),
    "an empty grammar": (GOOD | {"guided_regex": ""}, 400, "INVALID_ARGUMENT", "guided_regex"),
    "two forms": (GOOD | {"guided_regex": "a", "guided_choice": ["b"]}, 400, "INVALID_ARGUMENT", "guided_choice"),
    "an unknown format": (GOOD | {"response_format": {"type": "xml"}}, 400, "INVALID_ARGUMENT", "response_format.type"),
    "a format without its schema": (
        GOOD | {"response_format": {"type": "json_schema"}},
        400,
        "INVALID_ARGUMENT",
        "response_format.json_schema",
    ),
    "a list instead of an object": ([1, 2], 400, "INVALID_ARGUMENT", None),
}
CHATS = {
    "no messages": (CHAT | {"messages": []}, "messages"),
    "too many messages": (CHAT | {"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
    "a message without content": (CHAT | {"messages": [{"role": "user"}]}, "messages[0].content"),
    "a picture": (
        CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    "tools": (CHAT | {"tools": [{"type": "function"}]}, "tools"),
    "stream options without stream": (CHAT | {"stream_options": {"include_usage": True}}, "stream_options"),
    "two limits": (CHAT | {"max_completion_tokens": 5}, "max_tokens"),
    "a misspelt field": (CHAT | {"maxTokens": 4}, "maxTokens"),
    "a sampler of llama.cpp": (CHAT | {"mirostat": 2}, "mirostat"),
    "an argument of the SDK": (CHAT | {"extra_body": {"top_k": 1}}, "extra_body"),
    "an alias out of range": ({**CHAT, "max_tokens": None, "n_predict": 0}, "n_predict"),
    "a message to continue": (
        CHAT | {"messages": [{"role": "assistant", "content": "Hi", "prefix": True}]},
        "messages[0].prefix",
    ),
    "top_logprobs without logprobs": (CHAT | {"top_logprobs": 2}, "top_logprobs"),
}
RAW = {
    "nothing": b"",
    "broken JSON": b'{"model": "mocker", "prompt": "Hi"',
    "no JSON": b"model=mocker&prompt=Hi",
    "invalid UTF-8": b'{"model": "mocker", "prompt": "\xff"}',
    "NaN": b'{"model": "mocker", "prompt": "Hi", "temperature": NaN}',
    "infinity": b'{"model": "mocker", "prompt": "Hi", "temperature": Infinity}',
    "deep nesting": b"[" * 100_000,
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "a comment": b'{"model": "mocker", "prompt": "Hi"} // please',
}


@pytest.mark.parametrize(("given", "status", "code", "param"), HTTP.values(), ids=HTTP.keys())
@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "streamed"])
def test_completions_refuse_bad_input(
    prepared: Setup, given: Any, status: int, code: str, param: str | None, is_streamed: bool
) -> None:
    streamed = given | {"stream": True} if is_streamed and isinstance(given, dict) else given
    data = json.dumps(streamed)

    asyncio.run(check_unharmed(prepared, check_http(prepared.frontend, data, "/v1/completions", status, code, param)))


@pytest.mark.parametrize(("given", "param"), CHATS.values(), ids=CHATS.keys())
def test_chat_refuses_bad_input(prepared: Setup, given: Any, param: str) -> None:
    path, data = "/v1/chat/completions", json.dumps(given)

    asyncio.run(check_unharmed(prepared, check_http(prepared.frontend, data, path, 400, "INVALID_ARGUMENT", param)))


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_http_refuses_malformed_json(prepared: Setup, data: bytes, path: str) -> None:
    asyncio.run(check_unharmed(prepared, check_http(prepared.frontend, data, path, 400, "INVALID_ARGUMENT", None)))


async def in_chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // MIB):
        yield bytes(MIB)


@pytest.mark.parametrize(
    "make", [lambda: io.BytesIO(bytes(BODY_BYTES)), lambda: in_chunks(BODY_BYTES)], ids=["with its length", "in chunks"]
)
def test_http_refuses_a_body_of_100_mb(prepared: Setup, make: Callable[[], Any]) -> None:
    bad_request = check_http(prepared.frontend, make(), "/v1/completions", 413, "BODY_TOO_LARGE", None)

    asyncio.run(check_unharmed(prepared, bad_request))


DIGITS = b"9" * 5000
FAULTY = {
    "a key given twice": (b'"max_tokens": 4, "max\\u005ftokens": 5', "max_tokens"),
    "a nested key given twice": (b'"stream_options": {"include_usage": true, "include_usage": null}', "stream_options"),
    "a key given twice in a schema": (b'"guided_json": {"properties": {"a": {}, "a": {}}}', "guided_json"),
    "a neutral field beyond any number": (b'"best_of": 1e999', "best_of"),
    "a neutral field of thousands of digits": (b'"typical_p": ' + DIGITS, "typical_p"),
    "a neutral field that is nested deeply": (b'"tools": ' + b"[" * 900 + b"]" * 900, "tools"),
    "a count beyond any number": (b'"n": 1e999', "n"),
    "a count of thousands of digits": (b'"max_tokens": ' + DIGITS, "max_tokens"),
    "a whole number out of range": (b'"seed": 1e30', "seed"),
    "a bias of thousands of digits": (b'"logit_bias": {"' + DIGITS + b'": 1}', "logit_bias"),
    "a fraction": (b'"max_tokens": 16.5', "max_tokens"),
}


@pytest.mark.parametrize(("field", "param"), FAULTY.values(), ids=FAULTY.keys())
@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_http_refuses_faulty_fields_by_name_and_counts_them(
    prepared: Setup, field: bytes, param: str, is_chat: bool
) -> None:
    """Bug: numbers that Python cannot decode ended in INTERNAL, which nobody counted."""
    prompt = b'"messages": [{"role": "user", "content": "Hi"}]' if is_chat else b'"prompt": "Hi"'
    path = "/v1/chat/completions" if is_chat else "/v1/completions"

    async def check() -> None:
        before = await counted()
        with pytest.raises(Refused) as caught:
            await post(prepared.frontend, b'{"model": "mocker", ' + prompt + b", " + field + b"}", path)
        assert (caught.value.code, caught.value.error["code"]) == (400, "INVALID_ARGUMENT")
        assert caught.value.error["param"].startswith(param)
        assert await counted() == before + 1

    async def counted() -> float:
        return await prepared.frontend.metric("dynamo_frontend_requests_total", error_type="INVALID_ARGUMENT")

    asyncio.run(check())


# gRPC


def bad_request(**fields: Any) -> inference_pb2.GenerateRequest:
    """Return a good request with these fields changed."""
    message = grpc_message(Request())
    for name, value in fields.items():
        holder: Any = message
        *path, last = name.split("__")
        for step in path:
            holder = getattr(holder, step)
        if isinstance(value, list):
            getattr(holder, last).extend(value)
        else:
            setattr(holder, last, value)
    return message


INVALID = ("INVALID_ARGUMENT", "INVALID_ARGUMENT")
GRPC = {
    "unknown model": (bad_request(model="gpt-9"), ("NOT_FOUND", "MODEL_NOT_FOUND"), "model"),
    "no model": (bad_request(model=""), INVALID, "model"),
    "no prompt": (inference_pb2.GenerateRequest(model="mocker"), INVALID, "prompt"),
    "empty prompt": (bad_request(text=""), INVALID, "prompt"),
    "too long prompt": (bad_request(text="x" * CONTEXT), ("INVALID_ARGUMENT", "PROMPT_TOO_LONG"), "prompt"),
    "unknown token": (bad_request(tokens__ids=[99_999]), INVALID, "prompt"),
    "no tokens at all": (bad_request(stop__max_tokens=0), INVALID, "max_tokens"),
    "huge max_tokens": (bad_request(stop__max_tokens=HUGE), INVALID, "max_tokens"),
    "NaN temperature": (bad_request(sampling__temperature=math.nan), INVALID, "temperature"),
    "negative temperature": (bad_request(sampling__temperature=-1), INVALID, "temperature"),
    "no answers": (bad_request(n=0), INVALID, "n"),
    "too many answers": (bad_request(n=65), INVALID, "n"),
    "too many log probabilities": (bad_request(logprobs=21), INVALID, "logprobs"),
    "a grammar that the engine does not support": (bad_request(guided__grammar="root ::= x"), INVALID, "guided"),
    "an empty grammar": (bad_request(guided__grammar=""), INVALID, "guided"),
    "a session": (bad_request(session_id="s"), INVALID, "session_id"),
    "a priority": (bad_request(priority=1), INVALID, "priority"),
    "a request id with a space": (bad_request(request_id="a b"), INVALID, "request_id"),
    "too many generated tokens": (bad_request(generated_token_ids=[32] * 100), INVALID, "generated_token_ids"),
}


async def refused(frontend: Frontend, message: Any, *, is_raw: bool = False) -> Refused:
    """Return how the frontend refuses the message, which may already be encoded."""
    unbounded = [*(dict(CHANNEL_OPTIONS) | {"grpc.max_send_message_length": -1}).items()]
    async with grpc.aio.insecure_channel(frontend.grpc, options=unbounded) as channel:
        generate: Any = inference_pb2_grpc.InferenceStub(channel).Generate
        if is_raw:
            generate = channel.unary_stream("/unbroken.v1.Inference/Generate")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(message).read()
    return refusal_from(caught.value)


@pytest.mark.parametrize(("message", "refusal", "param"), GRPC.values(), ids=GRPC.keys())
def test_generate_refuses_bad_input(prepared: Setup, message: Any, refusal: tuple[str, str], param: str) -> None:
    """`refusal`: status and reason."""

    async def check() -> None:
        got = await refused(prepared.frontend, message)
        assert (got.code, got.reason, got.error["param"]) == (*refusal, param)
        assert got.error["message"]
        assert got.error["retryable"] == "false"

    asyncio.run(check_unharmed(prepared, check()))


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        (b"\xff\xff\xff\xff", ("INVALID_ARGUMENT", "INVALID_ARGUMENT")),
        (bytes(MESSAGE_BYTES_MAX + 1), ("RESOURCE_EXHAUSTED", "BODY_TOO_LARGE")),
    ],
    ids=["bytes that are not a message", "a message above the size limit"],
)
def test_generate_refuses_malformed_messages(prepared: Setup, message: bytes, refusal: tuple[str, str]) -> None:
    """`refusal`: status and reason."""

    async def check() -> None:
        got = await refused(prepared.frontend, message, is_raw=True)
        assert (got.code, got.reason) == refusal

    asyncio.run(check_unharmed(prepared, check()))


@pytest.mark.parametrize("port", ["grpc", "http"])
def test_bytes_of_an_unknown_protocol_close_only_their_own_connection(prepared: Setup, port: str) -> None:
    async def check() -> None:
        host, _, number = prepared.frontend.ready[port].partition(":")
        reader, writer = await asyncio.open_connection(host, int(number))
        writer.write(b"\x16\x03\x01\x00\xa5 hello\r\n\r\n" * 10)
        async with asyncio.timeout(20):
            await reader.read()  # The frontend closes the connection.
        writer.close()

    asyncio.run(check_unharmed(prepared, check()))
