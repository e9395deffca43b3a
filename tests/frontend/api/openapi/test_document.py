"""The OpenAPI document lists every call and no other, and bodies are as it says."""

import json
from typing import Any

import msgspec
import pytest

from services.core.errors import Failure, Reason
from services.frontend.api import health
from services.frontend.api.admin import http_routes as admin
from services.frontend.api.openai import schemas
from services.frontend.api.openapi.document import describe
from services.frontend.api.openapi.operations import ANSWER_REASONS, OPERATIONS, Document
from services.http.errors import Error
from services.http.server.config import HttpConfig
from tests.http.support import End, Say, Script, admin_of, events, run, serving

MODEL = {"model": "org/tiny"}
COMPLETION = MODEL | {"prompt": "hi"}
CHAT = MODEL | {"messages": [{"role": "user", "content": "hi"}]}
STEPS = (Say("a", tokens=b"a", logprob=-1.0, top=((98, -2.0),)), Say("b"), End())


def strict(body: bytes, shape: type[msgspec.Struct]) -> None:
    """Check that the body has all fields of the schema and no others."""
    value = msgspec.json.decode(body, type=shape)

    assert msgspec.to_builtins(value) == json.loads(body)


async def document_of(server: Any) -> dict[str, Any]:
    response, body = await server.get("/openapi.json")
    assert response.status == 200
    document: dict[str, Any] = json.loads(body)
    return document


def test_document_lists_every_operation() -> None:
    async def test() -> None:
        async with serving(Script(), admin=admin_of()) as server:
            document = await document_of(server)

        described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        assert described == set(OPERATIONS)

    run(test)


def test_every_listed_operation_is_served() -> None:
    async def test() -> None:
        async with serving(Script(), admin=admin_of()) as server:
            for path, methods in (await document_of(server))["paths"].items():
                for method in methods:
                    url = path.format(model="org/tiny", request_id="a", generation_id="0" * 32)
                    async with server.session.request(method, url) as response:
                        body = await response.read()
                    assert str(response.status) in methods[method]["responses"], (path, method)
                    assert response.status not in {404, 405} or b"STREAM_NOT_FOUND" in body, body

    run(test)


def test_disabled_admin_calls_are_not_listed() -> None:
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
        ("/busy_threshold", MODEL, admin.ChangedThresholds),
        ("/v1/completions", {}, Error),
    ],
)
def test_answers_to_post_match_their_schema(path: str, body: Any, shape: type[msgspec.Struct]) -> None:
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
        ("/live", health.Live),
        ("/health", health.Ready),
        ("/busy_threshold", admin.AllThresholds),
        ("/openapi.json", Document),
        ("/nowhere", Error),
    ],
)
def test_answers_to_get_match_their_schema(path: str, shape: type[msgspec.Struct]) -> None:
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
def test_events_match_their_schema(path: str, body: Any, shape: type[msgspec.Struct]) -> None:
    async def test() -> None:
        asked = body | {"stream": True, "logprobs": path != "/v1/completions" or 1}
        async with serving(Script(*STEPS)) as server:
            _, answer = await server.post(path, asked | {"stream_options": {"include_usage": True}})

        *chunks, done = events(answer)
        assert done == "[DONE]"
        for chunk in chunks:
            strict(json.dumps(chunk).encode(), shape)

    run(test)


def test_reasons_are_listed_under_the_configured_overload_status() -> None:
    responses = describe([("/v1/completions", "POST")], HttpConfig(overload_status=529)).paths["/v1/completions"][
        "post"
    ]["responses"]

    assert "OVERLOADED" in responses["529"]["description"]
    assert "OVERLOADED" not in responses["503"]["description"]
    assert "NO_WORKERS" in responses["503"]["description"]


@pytest.mark.parametrize("reason", sorted(ANSWER_REASONS))
def test_status_of_every_failure_of_a_completion_is_listed(reason: Reason) -> None:
    async def test() -> None:
        async with serving(Script(Failure(reason, "as scripted")), config=HttpConfig(overload_status=429)) as server:
            document = await document_of(server)
            response, _ = await server.post("/v1/completions", COMPLETION)

        assert str(response.status) in document["paths"]["/v1/completions"]["post"]["responses"]

    run(test)


def test_resumed_answer_has_the_form_of_either_endpoint() -> None:
    answered = describe([("/v1/streams/{generation_id}", "GET")], HttpConfig())

    get = answered.paths["/v1/streams/{generation_id}"]["get"]
    assert get["responses"]["200"]["content"]["application/json"]["schema"] == {
        "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Completion", "ChatCompletion")]
    }
    assert "a Completion or a ChatCompletionChunk" in get["responses"]["200"]["description"]
    assert {"Completion", "ChatCompletion", "ChatCompletionChunk"} <= set(answered.components["schemas"])
    assert "Last-Event-ID" in [parameter["name"] for parameter in get["parameters"]]


@pytest.mark.parametrize(
    ("generation_id", "headers", "status", "reason"),
    [
        ("0" * 32, {}, 404, "STREAM_NOT_FOUND"),
        ("chatcmpl-" + "0" * 32, {"Last-Event-ID": "3-00000000"}, 404, "STREAM_NOT_FOUND"),
        ("0" * 31, {}, 400, "INVALID_ARGUMENT"),
        ("0" * 32, {"Last-Event-ID": "3"}, 400, "INVALID_ARGUMENT"),
    ],
)
def test_answer_that_cannot_be_resumed_is_refused_as_the_document_says(
    generation_id: str, headers: dict[str, str], status: int, reason: str
) -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            document = await document_of(server)
            async with server.session.get(f"/v1/streams/{generation_id}", headers=headers) as response:
                body = await response.read()

        strict(body, Error)
        assert (response.status, json.loads(body)["error"]["code"]) == (status, reason)
        assert str(status) in document["paths"]["/v1/streams/{generation_id}"]["get"]["responses"]

    run(test)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_client_that_comes_back_with_the_last_id_gets_nothing(method: str) -> None:
    """Status 204 keeps an EventSource from coming back."""
    path = "/v1/completions" if method == "POST" else "/v1/streams/" + "0" * 32
    headers = {"Last-Event-ID": "done", "X-Request-Id": "0" * 32}

    async def test() -> None:
        async with serving(Script()) as server:
            document = await document_of(server)
            async with server.session.request(method, path, headers=headers) as response:
                body = await response.read()

        assert (response.status, body) == (204, b"")
        assert "204" in document["paths"]["/v1/streams/{generation_id}"]["get"]["responses"]

    run(test)


def test_schema_of_a_finish_reason_lists_the_words_of_openai() -> None:
    components = describe([("/v1/completions", "POST")], HttpConfig()).components

    assert set(components["schemas"]["FinishReason"]["enum"]) == {"stop", "length"}


def test_roles_of_messages_are_listed() -> None:
    components = describe([("/v1/chat/completions", "POST")], HttpConfig()).components

    role = components["schemas"]["ChatMessage"]["properties"]["role"]
    assert role["enum"] == [
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
    ]
