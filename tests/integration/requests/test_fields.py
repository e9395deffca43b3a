"""A request field of another server gives the answer that it asks for, by a real model, or is refused by name.

| workload | nemesis | checker |
| --- | --- | --- |
| forms and limits under the names of each server, to both endpoints, streamed or whole | none | the form holds |
| the same request under the name that is ours | none | the same answer |
| fields that are not honoured | none | 400 that names the field |
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from tests.integration.conftest import Start
from tests.integration.harness.plane.processes import Frontend

pytestmark = pytest.mark.model

SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= ("yes" | "no") " " [0-9]{3}'
REGEX = "(yes|no) [0-9]{3}"
JSON = re.compile(r'\{\s*"colour"\s*:\s*"(red|green)"\s*,\s*"count"\s*:\s*[3-9]\s*\}')
SHORT = re.compile(r"(yes|no) [0-9]{3}")
ASKED: dict[str, Any] = {"model": "smollm2", "temperature": 0.8, "seed": 7, "max_tokens": 60}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "My favourite:"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What do you like?"}]},
}
FORMS: dict[str, tuple[dict[str, Any], re.Pattern[str]]] = {
    "json_schema": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, JSON),
    "llama.cpp's json_object": ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JSON),
    "llama.cpp's json_schema": ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JSON),
    "TGI's json": ({"response_format": {"type": "json", "value": SCHEMA}}, JSON),
    "TensorRT-LLM's json": ({"response_format": {"type": "json", "schema": SCHEMA}}, JSON),
    "llama.cpp's schema": ({"json_schema": SCHEMA}, JSON),
    "SGLang's schema": ({"json_schema": json.dumps(SCHEMA)}, JSON),
    "vLLM's schema": ({"structured_outputs": {"json": SCHEMA}}, JSON),
    "TGI's json grammar": ({"grammar": {"type": "json", "value": SCHEMA}}, JSON),
    "TGI's regex grammar": ({"grammar": {"type": "regex", "value": REGEX}}, SHORT),
    "TGI's regex": ({"response_format": {"type": "regex", "value": REGEX}}, SHORT),
    "SGLang's regex": ({"regex": REGEX}, SHORT),
    "vLLM's regex": ({"guided_regex": REGEX}, SHORT),
    "llama.cpp's grammar": ({"grammar": GRAMMAR}, SHORT),
    "SGLang's ebnf": ({"ebnf": GRAMMAR}, SHORT),
    "TensorRT-LLM's ebnf": ({"response_format": {"type": "ebnf", "ebnf": GRAMMAR}}, SHORT),
    "a grammar as format": ({"response_format": {"type": "grammar", "grammar": GRAMMAR}}, SHORT),
    "vLLM's grammar": ({"guided_grammar": GRAMMAR}, SHORT),
}
"""Fields → what the answer must match."""
SAME = (
    ("json_schema", "llama.cpp's json_object", "llama.cpp's json_schema", "TGI's json", "TGI's json grammar"),
    ("json_schema", "llama.cpp's schema", "SGLang's schema", "vLLM's schema"),
    ("json_schema", "TensorRT-LLM's json"),
    ("vLLM's regex", "SGLang's regex", "TGI's regex", "TGI's regex grammar"),
    ("vLLM's grammar", "llama.cpp's grammar", "SGLang's ebnf", "TensorRT-LLM's ebnf", "a grammar as format"),
)
"""Forms that are one form."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a grammar with look-ahead": ({"ebnf": 'root ::= "a" (= "b")'}, "ebnf"),
    "a grammar that is no GBNF": ({"grammar": 'start: "a"'}, "grammar"),
    "a schema that cannot be followed": ({"json_schema": {"type": "array", "uniqueItems": True}}, "json_schema"),
    "a grammar of a kind that TGI lacks": ({"grammar": {"type": "xml", "value": SCHEMA}}, "grammar.type"),
    "a structural tag": ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format.type"),
    "a window of penalties": ({"presence_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n"),
    "a limit below 1": ({"max_tokens": None, "max_new_tokens": 0}, "max_new_tokens"),
}


@pytest.fixture(scope="module")
def frontend(start_plane: Start) -> Iterator[Frontend]:
    plane = start_plane()
    asyncio.run(plane.worker("--engine=llamacpp", "--model=smollm2", "--threads=1"))
    yield plane.frontend
    assert not plane.frontend.events_until_now(level="error")


async def ask(frontend: Frontend, path: str, fields: dict[str, Any], *, stream: bool = False) -> tuple[str, str]:
    """The text and the finish reason of an answer."""
    body = ASKED | ENDPOINTS[path] | fields | {"stream": stream}
    async with aiohttp.ClientSession() as session, session.post(f"{frontend.http}{path}", json=body) as response:
        text = await response.text()
    assert response.status == 200, text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(map(_text_of, choices)), choices[-1]["finish_reason"]


def _text_of(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


@pytest.mark.parametrize(("path", "stream"), [("/v1/completions", True), ("/v1/chat/completions", False)])
def test_answer_has_the_form_that_was_asked_for(frontend: Frontend, path: str, stream: bool) -> None:
    """Bug: several of these fields were dropped, and the answer was prose."""

    async def scenario() -> dict[str, tuple[str, str]]:
        async with asyncio.TaskGroup() as group:
            tasks = {
                name: group.create_task(ask(frontend, path, fields, stream=stream))
                for name, (fields, _) in FORMS.items()
            }
        return {name: task.result() for name, task in tasks.items()}

    answers = asyncio.run(scenario())

    for name, (text, reason) in answers.items():
        assert FORMS[name][1].fullmatch(text), (name, text)
        assert reason == "stop", name
    for names in SAME:
        assert len({answers[name] for name in names}) == 1, names


@pytest.mark.parametrize("path", ENDPOINTS)
def test_limit_under_each_name_is_the_same(frontend: Frontend, path: str) -> None:
    async def scenario() -> list[tuple[str, str]]:
        names = ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens")
        return [await ask(frontend, path, {"max_tokens": None, name: 7, "ignore_eos": True}) for name in names]

    first, *others = asyncio.run(scenario())

    assert first[1] == "length"
    assert others == [first] * 3


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("case", REFUSED)
def test_field_that_cannot_be_honoured_is_refused_by_name(frontend: Frontend, path: str, case: str) -> None:
    fields, param = REFUSED[case]

    async def scenario() -> tuple[int, Any]:
        body = ASKED | ENDPOINTS[path] | fields
        async with aiohttp.ClientSession() as session, session.post(f"{frontend.http}{path}", json=body) as response:
            return response.status, await response.json()

    status, answer = asyncio.run(scenario())

    assert (status, answer["error"]["param"]) == (400, param)
