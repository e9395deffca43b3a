"""Completions, chats, models and cancels are answered. A failure has the error envelope and costs no other request."""

import asyncio
import gc
import json
import threading
from typing import Any

import aiohttp
import pytest

from services.core.call import Call
from services.core.errors import QUOTED_CHARACTERS_MAX, Failure, Reason, invalid
from services.core.interface import Finish, Sink
from services.core.request import FinishReason, Message, Request
from services.frontend.api import build
from services.frontend.api.openai.bodies import CompletionBody
from services.frontend.api.openai.endpoints import LARGE_BODY_BYTES
from services.frontend.api.openai.parse import parse_completion
from services.http.server.config import HttpConfig
from tests.http.support import (
    CARD,
    HANG,
    End,
    Say,
    Script,
    Server,
    StubFrontend,
    error_of,
    events,
    raw_post,
    run,
    serving,
)

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def test_completion_has_the_whole_text_and_the_usage() -> None:
    async def test() -> None:
        script = Script("Hel", 2, "", "lo\n😀")
        async with serving(script) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION)

        answer = json.loads(body)
        assert response.status == 200
        assert answer["choices"] == [
            {"index": 0, "text": "Hello\n😀", "logprobs": None, "finish_reason": "stop"},
        ]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        assert script.requests[0].text == "hi"
        assert (script.calls[0].endpoint, script.calls[0].is_streamed) == ("completions", False)

    run(test)


def test_chat_completion_has_one_message() -> None:
    async def test() -> None:
        script = Script("Hel", "lo")
        async with serving(script) as server:
            _, body = await server.post(CHATS, CHAT)

        assert json.loads(body)["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        assert script.requests[0].messages == (Message("user", "hi"),)
        assert (script.calls[0].endpoint, script.calls[0].is_streamed) == ("chat_completions", False)

    run(test)


def test_failure_after_tokens_is_not_a_200() -> None:
    async def test() -> None:
        async with serving(Script("a", 2, Reason.ENGINE_ERROR)) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION)

        assert response.status == 500
        assert error_of(body)["code"] == "ENGINE_ERROR"

    run(test)


def test_choices_are_in_order_and_share_one_usage() -> None:
    async def test() -> None:
        script = Script(Say("b", 1), Say("a", 0), Say("B", 1), End(1, FinishReason.LENGTH, "!"), Say("A", 0), End(0))
        async with serving(script) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION | {"n": 2})

        answer = json.loads(body)
        assert answer["choices"] == [
            {"index": 0, "text": "aA", "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "text": "bB!", "logprobs": None, "finish_reason": "length"},
        ]
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert script.requests[0].n == 2

    run(test)


def test_log_probabilities_cover_the_whole_answer() -> None:
    async def test() -> None:
        script = Script(Say("", tokens=b"a", logprob=-1.0), 2, Say("ab", tokens=b"b", logprob=-2.0, top=((98, -2.0),)))
        async with serving(script) as server:
            _, completion = await server.post(COMPLETIONS, COMPLETION | {"logprobs": 1})
            _, chat = await server.post(CHATS, CHAT | {"logprobs": True, "top_logprobs": 1})

        assert json.loads(completion)["choices"][0]["logprobs"] == {
            "tokens": ["a", "b"],
            "token_logprobs": [-1.0, -2.0],
            "top_logprobs": [{"a": -1.0}, {"b": -2.0}],
            "text_offset": [0, 1],
        }
        entries = json.loads(chat)["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], len(entry["top_logprobs"])) for entry in entries] == [("a", 0), ("b", 1)]
        assert [request.logprobs for request in script.requests] == [1, 1]

    run(test)


def test_error_includes_the_partial_answer_if_the_client_asks() -> None:
    async def test() -> None:
        script = Script(Say("a", 1), 2, End(1), Say("b"), Reason.DISCONNECTED)
        async with serving(script) as server:
            headers = {"X-Return-Partial": "True"}
            response, completion = await server.post(COMPLETIONS, COMPLETION | {"n": 2}, headers=headers)
            _, chat = await server.post(CHATS, CHAT | {"n": 2}, headers=headers)
            _, without = await server.post(COMPLETIONS, COMPLETION | {"n": 2}, headers={"X-Return-Partial": "false"})

        error = error_of(completion, has_partial=True)
        assert (response.status, error["code"]) == (502, "DISCONNECTED")
        assert response.headers["X-Request-Id"] == error["request_id"]
        assert error["partial"] == {
            "choices": [
                {"index": 0, "text": "b", "finish_reason": None},
                {"index": 1, "text": "a", "finish_reason": "stop"},
            ]
        }
        assert [choice["message"]["content"] for choice in error_of(chat, has_partial=True)["partial"]["choices"]] == [
            "b",
            "a",
        ]
        error_of(without)

    run(test)


def test_failure_with_a_partial_answer_names_the_field_as_the_client_does() -> None:
    async def test() -> None:
        async with serving(Script(Say("a"), invalid("guided", "no"))) as server:
            body = COMPLETION | {"guided_regex": "a+"}
            _, answer = await server.post(COMPLETIONS, body, headers={"X-Return-Partial": "true"})

        assert error_of(answer, has_partial=True)["param"] == "guided_regex"

    run(test)


def test_error_has_no_partial_answer_if_no_token_came() -> None:
    async def test() -> None:
        async with serving(Script(2, Reason.OVERLOADED)) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION, headers={"X-Return-Partial": "true"})

        error_of(body)
        assert response.headers["Retry-After"] == "2"

    run(test)


@pytest.mark.parametrize("body", [COMPLETION, COMPLETION | {"stream": True}], ids=["unary", "stream"])
@pytest.mark.parametrize("status", [429, 529])
def test_lack_of_capacity_has_the_configured_status(status: int, body: dict[str, Any]) -> None:
    async def test() -> None:
        busy = Failure(Reason.OVERLOADED, "busy", retry_after_s=7.0, metadata={"workers": "2"})
        async with serving(Script(1, busy), config=HttpConfig(overload_status=status)) as server:
            response, answer = await server.post(COMPLETIONS, body)

        assert (response.status, response.headers["Retry-After"]) == (status, "7")
        assert json.loads(answer)["error"]["metadata"] == {"workers": "2"}

    run(test)


@pytest.mark.parametrize("steps", [(HANG,), ("a", 2, HANG)])
def test_request_of_a_client_that_disconnects_is_cancelled(steps: tuple[Any, ...]) -> None:
    async def test() -> None:
        script = Script(*steps)
        async with serving(script) as server:
            _, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION))
            await script.running.wait()
            writer.close()
            await script.cancelled.wait()

    run(test)


async def cancel(server: Server, request_id: str) -> Any:
    """The answer to a cancel of `request_id`."""
    response, body = await server.post(f"/v1/requests/{request_id}/cancel", b"")
    assert response.status == 200
    return json.loads(body)


def test_request_is_cancelled_by_its_id() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script, connections_max=2) as server, asyncio.TaskGroup() as group:
            answering = group.create_task(server.post(COMPLETIONS, COMPLETION, headers={"X-Request-Id": "mine"}))
            await script.running.wait()
            answers = [await cancel(server, name) for name in ("another", "mine", "mine")]
            response, body = await answering

        assert answers == [
            {"id": "another", "cancelled": 0},
            {"id": "mine", "cancelled": 1},
            {"id": "mine", "cancelled": 0},
        ]
        assert (response.status, error_of(body)["code"]) == (499, "CANCELLED")
        assert script.cancelled.is_set()
        assert server.outcomes.seen == [Reason.CANCELLED]

    run(test)


def test_stream_that_is_cancelled_by_its_id_ends_with_an_error_event() -> None:
    async def test() -> None:
        async with serving(Script("a", 5, HANG), connections_max=2) as server:
            body = COMPLETION | {"stream": True}
            async with server.session.post(COMPLETIONS, json=body, headers={"X-Request-Id": "mine"}) as response:
                first = await response.content.readuntil(b"\n\n")
                answer = await cancel(server, "mine")
                rest = await response.read()

        assert answer["cancelled"] == 1
        kind, error = events(first + rest)[-1]
        assert (kind, error["error"]["code"]) == ("error", "CANCELLED")

    run(test)


@pytest.mark.parametrize("name", ["a%20b", "x" * 129, "%C3%A9"])
def test_cancel_with_an_invalid_id_is_refused(name: str) -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            response, body = await server.post(f"/v1/requests/{name}/cancel", b"")

        assert (response.status, error_of(body)["param"]) == (400, "request_id")

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "INVALID_ARGUMENT", None),
        (b"\xff", 400, "INVALID_ARGUMENT", None),
        (b"", 400, "INVALID_ARGUMENT", None),
        (b"[]", 400, "INVALID_ARGUMENT", None),
        ({"prompt": "x"}, 400, "INVALID_ARGUMENT", "model"),
        ({"model": "m"}, 400, "INVALID_ARGUMENT", "prompt"),
        (COMPLETION | {"temperature": "hot"}, 400, "INVALID_ARGUMENT", "temperature"),
        (COMPLETION | {"best_of": 2}, 400, "INVALID_ARGUMENT", "best_of"),
        (COMPLETION | {"guided_regex": "a", "guided_json": {}}, 400, "INVALID_ARGUMENT", "guided_regex"),
        (COMPLETION | {"prompt": ["a", 1]}, 400, "INVALID_ARGUMENT", "prompt"),
        (COMPLETION | {"stream": True, "seed": "x"}, 400, "INVALID_ARGUMENT", "seed"),
        (COMPLETION | {"prompt": "x" * 5000}, 413, "BODY_TOO_LARGE", None),
    ],
)
def test_invalid_body_is_refused_by_field_and_the_next_request_succeeds(
    body: Any, status: int, code: str, param: Any
) -> None:
    async def test() -> None:
        async with serving(Script("ok"), config=HttpConfig(body_bytes_max=5000)) as server:
            response, answer = await server.post(COMPLETIONS, body, headers={"X-Request-Id": "bad"})
            error = error_of(answer)
            assert (response.status, error["code"], error["param"]) == (status, code, param)
            assert error["type"] == "invalid_request_error"
            assert error["request_id"] == response.headers["X-Request-Id"] == "bad"
            assert error["message"]
            assert (await server.post(COMPLETIONS, COMPLETION))[0].status == 200

    run(test)


LONG = "x" * 100_000


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (COMPLETION, {"Content-Encoding": "x" * 4_000}),
        (COMPLETION | {"logit_bias": {LONG: 1}}, {}),
        (COMPLETION | {"response_format": {"type": LONG}}, {}),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": LONG, "text": "x"}]}]}, {}),
    ],
    ids=["encoding", "token", "format", "part"],
)
def test_messages_shorten_long_values(body: dict[str, Any], headers: dict[str, str]) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            response, answer = await server.post(CHATS if "messages" in body else COMPLETIONS, body, headers=headers)

        assert response.status == 400
        assert QUOTED_CHARACTERS_MAX <= len(error_of(answer)["message"]) < QUOTED_CHARACTERS_MAX + 200

    run(test)


def test_too_large_content_length_is_refused_before_the_body_is_sent() -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n"

    run(test)


def test_chunked_body_is_refused_once_it_is_too_large() -> None:
    async def test() -> None:
        async with serving(Script("ok"), config=HttpConfig(body_bytes_max=5000)) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1771\r\n" + b" " * 6001 + b"\r\n")
            assert await reader.readline() == b"HTTP/1.1 413 Request Entity Too Large\r\n"

    run(test)


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Transfer-Encoding: chunked\r\n", b"zz\r\n"),
        (b"Content-Encoding: gzip\r\nContent-Length: 4\r\n", b"nope"),
    ],
)
def test_body_that_does_not_match_its_headers_is_a_400(head: bytes, body: bytes) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + body)
            assert b" 400 " in await reader.readline()

    run(test)


def test_body_that_does_not_arrive_in_time_is_a_504() -> None:
    async def test() -> None:
        async with serving(Script("ok"), config=HttpConfig(body_read_s_max=0.02)) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            assert await reader.readline() == b"HTTP/1.1 504 Gateway Timeout\r\n"

    run(test)


def test_client_that_disconnects_in_its_body_causes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            _, writer = await server.connect()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            await writer.drain()
            assert (await server.get("/live"))[0].status == 200
            writer.close()

    run(test)
    assert not caplog.records


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
def test_content_type_is_ignored(content_type: str) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            response, _ = await server.post(COMPLETIONS, COMPLETION, headers={"Content-Type": content_type})

        assert response.status == 200

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/none", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/health", 405),
    ],
)
def test_unknown_paths_and_methods_have_the_error_envelope(method: str, path: str, status: int) -> None:
    async def test() -> None:
        async with serving(Script()) as server, server.session.request(method, path) as response:
            error = error_of(await response.read())

        assert response.status == status
        assert response.headers["X-Request-Id"] == error["request_id"]
        assert ("Allow" in response.headers) == (status == 405)
        assert error["hint"], "lists the routes, or the models"

    run(test)


def test_error_of_an_unknown_path_lists_the_routes() -> None:
    async def test() -> None:
        async with serving(Script()) as server, server.session.get("/v1/" + "x" * 1000) as response:
            error = error_of(await response.read())

        assert error["message"] == f"there is no GET /v1/{'x' * (QUOTED_CHARACTERS_MAX - 4)} here"
        assert error["hint"] == (
            "There are GET /health, GET /live, GET /metrics, GET /openapi.json, POST /v1/chat/completions,"
            " POST /v1/completions, GET /v1/models, GET /v1/models/{model}, POST /v1/requests/{request_id}/cancel,"
            " GET /v1/streams/{generation_id}."
        )

    run(test)


def test_list_of_models_is_refused_until_a_registry_has_answered() -> None:
    async def test() -> None:
        async with serving(Script(), catalog=StubFrontend(cards=[], has_view=False)) as server:
            response, body = await server.get("/v1/models")

        assert (response.status, error_of(body)["code"]) == (503, "NO_WORKERS")
        assert response.headers["Retry-After"] == "1"

    run(test)


def test_list_of_models_is_refused_while_no_registered_worker_is_connected() -> None:
    """A bug: it was an empty list, from which clients conclude that there is no model."""

    async def test() -> None:
        async with serving(Script(), catalog=StubFrontend(cards=[], unreached_count=2)) as server:
            response, body = await server.get("/v1/models")

        assert (response.status, error_of(body)["code"]) == (503, "NO_WORKERS")
        assert "registered: 2" in error_of(body)["message"]

    run(test)


def test_models_are_those_that_can_be_served() -> None:
    async def test() -> None:
        frontend = StubFrontend()
        async with serving(Script(), catalog=frontend) as server:
            _, listed = await server.get("/v1/models")
            _, one = await server.get("/v1/models/org/tiny")
            frontend.cards = []
            _, none = await server.get("/v1/models")

        model = json.loads(one)
        assert json.loads(listed) == {"object": "list", "data": [model]}
        assert (model["id"], model["object"], model["owned_by"]) == (CARD.model, "model", "unbroken")
        assert model["max_model_len"] == CARD.context_length
        assert isinstance(model["created"], int)
        assert json.loads(none) == {"object": "list", "data": []}

    run(test)


def test_concurrent_requests_get_their_own_answers() -> None:
    async def test() -> None:
        async def echo(request: Any, call: Any, sink: Any) -> Any:
            return await Script(1, request.text, 1)(request, call, sink)

        async def ask(session: aiohttp.ClientSession, number: int) -> str:
            async with session.post(COMPLETIONS, json=COMPLETION | {"prompt": f"<{number}>"}) as response:
                return str((await response.json())["choices"][0]["text"])

        async with (
            serving(echo) as server,
            aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session,
            asyncio.TaskGroup() as group,
        ):
            tasks = [group.create_task(ask(session, number)) for number in range(50)]

        assert [task.result() for task in tasks] == [f"<{number}>" for number in range(50)]

    run(test)


def test_bug_before_the_pipeline_is_reported_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: such a request was answered with 500 and not counted."""
    refused: list[Reason] = []

    def fail(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("services.frontend.api.openai.endpoints.wants_partial", fail)

    async def test() -> None:
        async with serving(Script("ok"), on_refused=lambda *given: refused.append(given[2].reason)) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION)

        assert (response.status, error_of(body)["code"]) == (500, "INTERNAL")

    run(test)
    assert refused == [Reason.INTERNAL]


def test_request_refused_before_the_pipeline_is_reported_once_with_its_id() -> None:
    refused: list[tuple[str, str, Reason]] = []

    def on_refused(endpoint: str, request_id: str, failure: Failure) -> None:
        refused.append((endpoint, request_id, failure.reason))

    async def test() -> None:
        pipeline = Script(Reason.OVERLOADED)
        async with serving(pipeline, on_refused=on_refused) as server:
            unnamed, _ = await server.post(COMPLETIONS, {"model": "m"})
            named.append(unnamed.headers["X-Request-Id"])
            await server.post("/v1/chat/completions", {"model": "m"}, headers={"X-Request-Id": "r-1"})
            await server.post(COMPLETIONS, COMPLETION)

    named: list[str] = []
    run(test)
    assert refused == [
        ("completions", named[0], Reason.INVALID_ARGUMENT),
        ("chat_completions", "r-1", Reason.INVALID_ARGUMENT),
    ]


def test_refused_resume_is_reported_once() -> None:
    """A bug: operators saw nothing of clients that came back in vain."""
    refused: list[tuple[str, str, Reason]] = []

    def on_refused(endpoint: str, request_id: str, failure: Failure) -> None:
        refused.append((endpoint, request_id, failure.reason))

    async def test() -> None:
        async with serving(Script(), on_refused=on_refused) as server:
            for name, generation_id in (("r-1", "0" * 32), ("r-2", "0")):
                head = {"X-Request-Id": name}
                async with server.session.get(f"/v1/streams/{generation_id}", headers=head) as response:
                    assert response.status in {400, 404}
            await server.post(COMPLETIONS, COMPLETION, headers={"X-Request-Id": "r-3", "Last-Event-ID": "1-00000000"})

    run(test)
    assert refused == [
        ("resume", "r-1", Reason.STREAM_NOT_FOUND),
        ("resume", "r-2", Reason.INVALID_ARGUMENT),
        ("resume", "r-3", Reason.INVALID_ARGUMENT),
    ]


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "mine"}, {"X-Unbroken-Generation-Id": "0" * 31}])
def test_repeated_request_without_the_id_of_its_answer_is_told_that_it_is_one(headers: dict[str, str]) -> None:
    async def test() -> None:
        async with serving(Script("ok")) as server:
            response, body = await server.post(
                COMPLETIONS, COMPLETION, headers=headers | {"Last-Event-ID": "1-00000000"}
            )

        assert response.status == 400
        assert error_of(body)["param"] == next(iter(headers), "X-Request-Id")
        assert "a request with Last-Event-ID goes on with an answer" in error_of(body)["message"]

    run(test)


@pytest.mark.parametrize(("size", "is_threaded"), [(1000, False), (LARGE_BODY_BYTES, True)])
def test_large_body_is_parsed_in_a_thread(size: int, is_threaded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recording(body: bytes, **options: Any) -> CompletionBody:
        threads.append(threading.get_ident())
        return parse_completion(body, **options)

    async def test() -> None:
        async with serving(Script("ok")) as server:
            response, _ = await server.post(COMPLETIONS, COMPLETION | {"prompt": "x" * size})
            assert response.status == 200
        assert [thread != threading.get_ident() for thread in threads] == [is_threaded]

    monkeypatch.setattr(build, "parse_completion", recording)
    run(test)


@pytest.mark.parametrize(
    ("path", "body", "param", "client_name"),
    [
        (CHATS, CHAT | {"response_format": {"type": "json_object"}}, "guided", "response_format"),
        (COMPLETIONS, COMPLETION | {"guided_regex": "a+"}, "guided", "guided_regex"),
        (
            CHATS,
            CHAT | {"structured_outputs": {"choice": ["a"]}, "stream": True},
            "guided",
            "structured_outputs.choice",
        ),
        (CHATS, CHAT | {"max_completion_tokens": 9, "stream": True}, "max_tokens", "max_completion_tokens"),
        (CHATS, CHAT | {"max_tokens": 9}, "max_tokens", "max_tokens"),
        (COMPLETIONS, COMPLETION, "prompt", "prompt"),
        (CHATS, CHAT, "prompt", "messages"),
        (CHATS, CHAT | {"stream": True}, "prompt", "messages"),
    ],
)
def test_refusal_of_the_pipeline_names_the_field_as_the_client_does(
    path: str, body: dict[str, Any], param: str, client_name: str
) -> None:
    async def test() -> None:
        async with serving(Script(1, invalid(param, "no"))) as server:
            response, answer = await server.post(path, body)

        assert (response.status, error_of(answer)["param"]) == (400, client_name)

    run(test)


SCHEMA = {"type": "object"}
FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": SCHEMA}, "json_schema", "guided_json"),
    ({"guided_regex": "a"}, "regex", "guided_regex"),
    ({"guided_choice": ["a"]}, "choice", "guided_choice"),
    ({"guided_grammar": "a"}, "grammar", "guided_grammar"),
    ({"json_schema": SCHEMA}, "json_schema", "json_schema"),
    ({"regex": "a"}, "regex", "regex"),
    ({"grammar": "a"}, "grammar", "grammar"),
    ({"grammar": {"type": "json", "value": SCHEMA}}, "json_schema", "grammar.value"),
    ({"grammar": {"type": "regex", "value": "a"}}, "regex", "grammar.value"),
    ({"grammar": {"type": "json_schema", "value": {"schema": SCHEMA}}}, "json_schema", "grammar.value.schema"),
    ({"ebnf": "a"}, "grammar", "ebnf"),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "a"}}, "grammar", "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, "json_object", "structured_outputs.json_object"),
    ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
    ({"response_format": {"type": "json", "value": SCHEMA}}, "json_schema", "response_format.value"),
    ({"response_format": {"type": "regex", "regex": "a"}}, "regex", "response_format.regex"),
    ({"response_format": {"type": "ebnf", "ebnf": "a"}}, "grammar", "response_format.ebnf"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        "json_schema",
        "response_format.json_schema",
    ),
]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(("form", "kind", "client_name"), FORMS)
def test_refusal_of_a_form_names_the_field_that_the_client_wrote(
    form: dict[str, Any], kind: str, client_name: str, is_streamed: bool
) -> None:
    """Bug: it named guided.regex, which no client over HTTP can send."""

    async def test() -> None:
        refusal = invalid("guided", f"guided.{kind} cannot be used: guided.{kind} is quoted")
        async with serving(Script(1, refusal)) as server:
            _, answer = await server.post(CHATS, CHAT | form | {"stream": is_streamed})

        assert error_of(answer)["param"] == client_name
        assert error_of(answer)["message"].startswith(f"{client_name} cannot be used: guided.{kind} is quoted")

    run(test)


@pytest.mark.parametrize(
    ("given", "refusal", "param", "detail"),
    [
        ({"regex": "a"}, invalid("guided.regex.a", "guided.regex.a is given twice"), "regex.a", "regex.a is given"),
        ({"n_predict": 9}, invalid("max_tokens", "max_tokens is 9: no"), "n_predict", "n_predict is 9: no"),
        ({"n_predict": 9}, invalid("min_tokens", "up to max_tokens, 9"), "min_tokens", "up to n_predict, 9"),
        ({"regex": "a"}, invalid("top_k", "guided.grammar is no field here"), "top_k", "guided.grammar is no field"),
    ],
)
def test_paths_and_other_fields_in_a_refusal_are_named_as_the_client_does(
    given: dict[str, Any], refusal: Failure, param: str, detail: str
) -> None:
    async def test() -> None:
        async with serving(Script(1, refusal)) as server:
            _, answer = await server.post(COMPLETIONS, COMPLETION | given)

        assert error_of(answer)["param"] == param
        assert error_of(answer)["message"].startswith(detail)

    run(test)


class Full:
    """A pipeline that refuses every request, and counts sinks that are still in memory."""

    def __init__(self) -> None:
        self._kinds: set[type] = set()

    async def __call__(self, request: Request, call: Call, sink: Sink) -> Finish:
        self._kinds.add(type(sink))
        raise Failure(Reason.OVERLOADED, "full")

    @property
    def left_count(self) -> int:
        """Sinks that have not been freed."""
        return sum(type(one) in self._kinds for one in gc.get_objects())


@pytest.mark.parametrize("is_streamed", [True, False])
def test_refused_request_is_freed_without_the_garbage_collector(is_streamed: bool) -> None:
    """Bug: in a storm of refusals, collections stopped every stream for a tenth of a second."""

    async def test() -> None:
        full = Full()
        async with serving(full) as server:
            for _ in range(3):
                response, _ = await server.post(COMPLETIONS, COMPLETION | {"stream": is_streamed})
                assert response.status == 503
            left = full.left_count

        assert left <= 1, "the connection may still refer to the last one"

    gc.collect()  # What other tests have left.
    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()
