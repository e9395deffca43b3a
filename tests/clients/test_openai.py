"""What clients of OpenAI's API rely on, tested against a real plane over plain HTTP."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from tests.clients.support.cluster import PATIENT
from tests.integration.harness.plane.fork_server import ForkServer
from tests.integration.harness.plane.plane import Plane

MODEL = "org/team/tiny"
PAGE = "https://chat.example"
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
ASKED = {"model": MODEL, "max_tokens": 8, "seed": 7}
COMPLETION = ASKED | {"prompt": "The moon"}
CHAT = ASKED | {"messages": [{"role": "user", "content": "The moon"}]}
WORDS = ("The moon", "has phases")
IDS = [list(text.encode()) for text in WORDS]
"""The mocker's tokens are bytes."""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with ForkServer() as processes:
        options = (PATIENT, f"--cors-allow-origin={PAGE}")
        plane = Plane(processes, tmp_path_factory.mktemp("openai"), frontend=options)
        asyncio.run(plane.worker(f"--served-model-name={MODEL}"))
        yield plane
        plane.close()


class Answered:
    """A complete response."""

    def __init__(self, response: aiohttp.ClientResponse, content: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        self.content = content

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def texts(self) -> list[str]:
        """The texts of the choices, from a unary or a streamed answer."""
        if not self.headers["Content-Type"].startswith("text/event-stream"):
            return [choice["text"] for choice in self.json["choices"]]
        *events, done = [line.removeprefix("data: ") for line in self.content.decode().split("\n\n")[:-1]]
        assert done == "[DONE]"
        texts: dict[int, str] = {}
        for choice in [choice for event in events for choice in json.loads(event)["choices"]]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[index] for index in sorted(texts)]


def ask(plane: Plane, method: str, path: str, body: Any = None, **headers: str) -> Answered:
    """Send one request. `headers`: underscores in their names stand for hyphens."""

    async def once() -> Answered:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        url = URL(plane.frontend.http + path, encoded=True)
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, json=body, headers=named) as response,
        ):
            return Answered(response, await response.read())

    return asyncio.run(once())


# Models


def test_models_are_listed_and_retrieved_by_id_even_with_slashes(plane: Plane) -> None:
    listed = ask(plane, "GET", "/v1/models").json
    one = ask(plane, "GET", f"/v1/models/{MODEL}").json
    quoted = ask(plane, "GET", f"/v1/models/{quote(MODEL, safe='')}").json

    assert listed == {"object": "list", "data": [one]}
    assert {"id", "object", "created", "owned_by"} <= one.keys()
    assert (one["id"], one["object"]) == (MODEL, "model")
    assert quoted == one


def test_unknown_model_is_not_found(plane: Plane) -> None:
    for answer in (
        ask(plane, "GET", "/v1/models/org"),
        ask(plane, "GET", f"/v1/models/{MODEL}/more"),
        ask(plane, "POST", COMPLETIONS, COMPLETION | {"model": "org"}),
        ask(plane, "POST", CHATS, CHAT | {"model": "org"}),
    ):
        assert answer.status == 404
        assert answer.json["error"]["param"] == "model"
        assert answer.json["error"]["type"] == "invalid_request_error"


# Prompts


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_is_a_string_token_ids_or_a_list_of_either(plane: Plane, stream: bool) -> None:
    def texts(prompt: Any) -> list[str]:
        return ask(plane, "POST", COMPLETIONS, COMPLETION | {"prompt": prompt, "stream": stream}).texts

    first, second = texts(WORDS[0]), texts(WORDS[1])

    assert first != second
    assert texts(IDS[0]) == first
    assert texts(list(WORDS)) == texts(IDS) == first + second


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_before_the_answer(plane: Plane, stream: bool) -> None:
    asked = COMPLETION | {"prompt": list(WORDS), "stream": stream}
    plain = ask(plane, "POST", COMPLETIONS, asked)
    echoed = ask(plane, "POST", COMPLETIONS, asked | {"echo": True})

    assert echoed.texts == [word + text for word, text in zip(WORDS, plain.texts, strict=True)]


# Fields


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
def test_unknown_fields_are_ignored(plane: Plane, path: str, body: Any) -> None:
    unknown = {"made_up": [1, {"x": None}], "metadata": {"a": "b"}, "store": True}
    plain, extended = (ask(plane, "POST", path, asked).json for asked in (body, body | unknown))

    assert extended["choices"] == plain["choices"]


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
@pytest.mark.parametrize(
    ("name", "value"),
    [("topP", 0.5), ("temprature", 0), ("mirostat", 2), ("repeat_penalty", 1.3), ("stop_regex", "a"), ("best_of", 2)],
)
def test_field_of_another_server_and_misspelt_field_are_refused_by_name(
    plane: Plane, path: str, body: Any, name: str, value: Any
) -> None:
    answer = ask(plane, "POST", path, body | {name: value})

    assert (answer.status, answer.json["error"]["param"]) == (400, name)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
@pytest.mark.parametrize("name", ["max_completion_tokens", "n_predict", "max_new_tokens"])
def test_limit_has_the_names_of_several_servers(plane: Plane, path: str, body: Any, name: str) -> None:
    asked = {field: value for field, value in body.items() if field != "max_tokens"}

    assert ask(plane, "POST", path, asked | {name: 8}).json["choices"] == ask(plane, "POST", path, body).json["choices"]


WRONG: list[tuple[str, Any, str, tuple[Any, ...]]] = [
    (COMPLETIONS, COMPLETION, "prompt", (5, {"text": "a"}, [1, "a"])),
    (COMPLETIONS, COMPLETION, "max_tokens", ("8", 8.5, True, [8], 0, -2)),
    (COMPLETIONS, COMPLETION, "stream", ("true", 1)),
    (COMPLETIONS, COMPLETION, "stop", (5, {})),
    (CHATS, CHAT, "messages", ("hi", None, {}, [])),
    (CHATS, CHAT, "temperature", ("hot", 2.1, {})),
    (CHATS, CHAT, "model", (None, 5)),
]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        *((path, body | {name: value}, name) for path, body, name, values in WRONG for value in values),
        (CHATS, CHAT | {"stop": ["a", 5]}, "stop[1]"),
        (CHATS, CHAT | {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (CHATS, {"messages": CHAT["messages"]}, "model"),
        (COMPLETIONS, [], None),
    ],
    ids=str,
)
def test_invalid_field_is_a_400_that_names_it(plane: Plane, path: str, body: Any, param: Any) -> None:
    answer = ask(plane, "POST", path, body)

    assert answer.status == 400
    error = answer.json["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]


@pytest.mark.parametrize(("method", "path", "status"), [("PUT", COMPLETIONS, 405), ("GET", "/v1/nowhere", 404)])
def test_unknown_paths_and_methods_answer_with_the_error_envelope(
    plane: Plane, method: str, path: str, status: int
) -> None:
    answer = ask(plane, method, path)

    assert answer.status == status
    assert {"message", "type", "param", "code"} <= answer.json["error"].keys()
    assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


# Headers


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", COMPLETIONS, COMPLETION),
        ("POST", COMPLETIONS, COMPLETION | {"stream": True}),
        ("POST", CHATS, CHAT | {"n": "two"}),
        ("GET", "/v1/models", None),
        ("GET", "/v1/nowhere", None),
    ],
    ids=str,
)
def test_response_has_the_request_id_that_was_sent_or_a_new_one(
    plane: Plane, method: str, path: str, body: Any
) -> None:
    named = ask(plane, method, path, body, X_Request_Id="mine")
    unnamed = {ask(plane, method, path, body).headers["X-Request-Id"] for _ in range(2)}

    assert named.headers["X-Request-Id"] == "mine"
    assert len(unnamed) == 2
    assert "" not in unnamed


def test_only_the_configured_origin_is_allowed(plane: Plane) -> None:
    wish = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization"}

    def allowed(origin: str) -> list[str | None]:
        answers = (
            ask(plane, "OPTIONS", CHATS, Origin=origin, **wish),
            ask(plane, "POST", CHATS, CHAT, Origin=origin),
            ask(plane, "POST", CHATS, {}, Origin=origin),
        )
        return [answer.headers.get("Access-Control-Allow-Origin") for answer in answers]

    assert allowed(PAGE) == [PAGE] * 3
    assert allowed("https://elsewhere.example") == [None] * 3
