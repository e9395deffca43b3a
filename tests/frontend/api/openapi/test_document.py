"""The OpenAPI document: every call is in it, no other is, and answers are as it says."""

import json
from typing import Any

import msgspec
import pytest

from services.core.errors import Failure, Reason
from services.frontend.api.openapi import schemas
from services.frontend.api.openapi.document import describe
from services.frontend.api.openapi.operations import ANSWER_REASONS, OPERATIONS
from services.http.server.config import HttpConfig
from tests.http.support import End, Say, Script, admin_of, events, run, serving

MODEL = {"model": "org/tiny"}
COMPLETION = MODEL | {"prompt": "hi"}
CHAT = MODEL | {"messages": [{"role": "user", "content": "hi"}]}
STEPS = (Say("a", tokens=b"a", logprob=-1.0, top=((98, -2.0),)), Say("b"), End())


def strict(body: bytes, shape: type[msgspec.Struct]) -> None:
    """See that the body has all that the shape says, and nothing else."""
    value = msgspec.json.decode(body, type=shape)

    assert msgspec.to_builtins(value) == json.loads(body)


async def document_of(server: Any) -> dict[str, Any]:
    response, body = await server.get("/openapi.json")
    assert response.status == 200
    document: dict[str, Any] = json.loads(body)
    return document


def test_every_path_and_method_is_described() -> None:
    async def test() -> None:
        async with serving(Script(), admin=admin_of()) as server:
            document = await document_of(server)

        described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert described == set(OPERATIONS)

    run(test)


def test_what_is_described_is_there() -> None:
    async def test() -> None:
        async with serving(Script(), admin=admin_of()) as server:
            for path, methods in (await document_of(server))["paths"].items():
                for method in methods:
                    url = path.format(model="org/tiny", request_id="a")
                    async with server.session.request(method, url) as response:
                        body = await response.read()
                    assert str(response.status) in methods[method]["responses"], (path, method)
                    assert response.status not in {404, 405}, body

    run(test)


def test_a_call_that_is_turned_off_is_not_described() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            assert "/busy_threshold" not in (await document_of(server))["paths"]

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/completions", COMPLETION, schemas.Completion),
        ("/v1/completions", COMPLETION | {"logprobs": 1}, schemas.Completion),
        ("/v1/chat/completions", CHAT, schemas.ChatCompletion),
        ("/v1/chat/completions", CHAT | {"logprobs": True}, schemas.ChatCompletion),
        ("/v1/requests/a/cancel", {}, schemas.Cancelled),
        ("/busy_threshold", MODEL, schemas.ChangedThresholds),
        ("/v1/completions", {}, schemas.Error),
    ],
)
def test_answers_are_as_described(path: str, body: Any, shape: type[msgspec.Struct]) -> None:
    async def test() -> None:
        steps = STEPS if "logprobs" in body else ("ab",)
        async with serving(Script(*steps), admin=admin_of()) as server:
            _, answer = await server.post(path, body)

        strict(answer, shape)

    run(test)


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/models", schemas.ModelList),
        ("/v1/models/org/tiny", schemas.Model),
        ("/live", schemas.Live),
        ("/health", schemas.Ready),
        ("/busy_threshold", schemas.AllThresholds),
        ("/openapi.json", schemas.Document),
        ("/nowhere", schemas.Error),
    ],
)
def test_what_is_got_is_as_described(path: str, shape: type[msgspec.Struct]) -> None:
    async def test() -> None:
        async with serving(Script(), admin=admin_of()) as server:
            _, answer = await server.get(path)

        strict(answer, shape)

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "shape"),
    [
        ("/v1/completions", COMPLETION, schemas.Completion),
        ("/v1/chat/completions", CHAT, schemas.ChatCompletionChunk),
    ],
)
def test_events_are_as_described(path: str, body: Any, shape: type[msgspec.Struct]) -> None:
    async def test() -> None:
        asked = body | {"stream": True, "logprobs": path != "/v1/completions" or 1}
        async with serving(Script(*STEPS)) as server:
            _, answer = await server.post(path, asked | {"stream_options": {"include_usage": True}})

        *told, done = events(answer)
        assert done == "[DONE]"
        for event in told:
            strict(json.dumps(event).encode(), shape)

    run(test)


def test_every_reason_that_a_request_can_fail_with_has_its_status() -> None:
    responses = describe([("/v1/completions", "POST")], 529)["paths"]["/v1/completions"]["post"]["responses"]

    assert "OVERLOADED" in responses["529"]["description"]
    assert "OVERLOADED" not in responses["503"]["description"]
    assert "NO_WORKERS" in responses["503"]["description"]


@pytest.mark.parametrize("reason", sorted(ANSWER_REASONS))
def test_no_status_of_a_failed_request_is_missing(reason: Reason) -> None:
    async def test() -> None:
        async with serving(Script(Failure(reason, "as scripted")), config=HttpConfig(overload_status=429)) as server:
            document = await document_of(server)
            response, _ = await server.post("/v1/completions", COMPLETION)

        assert str(response.status) in document["paths"]["/v1/completions"]["post"]["responses"]

    run(test)
