"""No input is a bug: whatever a client sends is answered, refused by name, and counted once under its reason.

| workload | nemesis | checker |
| --- | --- | --- |
| bodies, headers, paths and messages that hypothesis makes of awkward values | none | status, envelope, counts |
"""

import asyncio
import http.client
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from services.frontend.api.openai.bodies import ChatBody, ChatMessage, CompletionBody, Part, StreamOptions
from services.frontend.api.openai.guided import JsonSchema, ResponseFormat, StructuredOutputs
from services.frontend.api.openai.other_fields import IN_CHAT, IN_COMPLETION
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.conftest import Start
from tests.integration.harness.clients.send import refusal_from
from tests.integration.harness.plane.plane import Plane

CONTEXT = 64
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEWER = settings(MANY, max_examples=100)
DIGITS = "9" * 5000

NUMBERS = st.sampled_from(
    (
        *("0", "1", "2", "-1", "-2", "-0", "-0.0", "16.0", "1e1", "0.5", "1e-400", "1e-40", "1e22", "1e30", "1e308"),
        *("1e999", "-1e999", "1E+99999999999", DIGITS, f"-{DIGITS}", f"{DIGITS}.5", f"0.{DIGITS}"),
        *("18446744073709551615", "18446744073709551616", "-9223372036854775808", "4294967296", "9007199254740993"),
    )
)
WRONG = st.sampled_from(("NaN", "-Infinity", "01", "1.", "+1", "'x'", "True", "// x", "", "[1,]", '"\\x"', '"\t"', '"'))
TEXTS = st.sampled_from(
    (
        *('""', '"x"', '"text"', '"json_schema"', '"json_object"', '"user"', '"1"', '"٣"', '"0005"', f'"{DIGITS}"'),
        *(r'"\ud83d"', r'"\ude00x"', r'"\ud83d\ude00"', r'"\u0000"', '"\u2028"', '"<|im_start|>"', '"{\\"a\\":1e999}"'),
        *('"{\\"a\\":1,\\"a\\":2}"', '"mocker"', '"NaN"', '"true"'),
    )
)
DEEP = st.sampled_from(("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 5000 + "]" * 5000))
NAMES = sorted(
    {
        *CompletionBody.__struct_fields__,
        *ChatBody.__struct_fields__,
        *ChatMessage.__struct_fields__,
        *Part.__struct_fields__,
        *StreamOptions.__struct_fields__,
        *ResponseFormat.__struct_fields__,
        *JsonSchema.__struct_fields__,
        *StructuredOutputs.__struct_fields__,
        *IN_CHAT,
        *IN_COMPLETION,
        *("", "1", "0005", "\u0663", "made_up"),
    }
)
KEYS = st.sampled_from([json.dumps(name) for name in NAMES] + [r'"max\u005ftokens"', r'"\ud83d"', f'"{DIGITS}"'])


def _objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(KEYS, values).map(": ".join), max_size=3)
    return pairs.map(lambda one: "{" + ", ".join(one) + "}")


LEAVES = NUMBERS | TEXTS | st.sampled_from(("null", "true", "false"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3).map(lambda one: f"[{', '.join(one)}]") | _objects(inner),
    max_leaves=6,
)
FIELDS = st.lists(st.tuples(KEYS, VALUES | DEEP | WRONG).map(": ".join), min_size=1, max_size=3)
PROMPTS = {
    "/v1/completions": '"model": "mocker", "prompt": "Hi"',
    "/v1/chat/completions": '"model": "mocker", "messages": [{"role": "user", "content": "Hi"}]',
}


@dataclass
class Setup:
    """A plane with one worker, a connection to its frontend, and the reasons of all refusals seen so far."""

    plane: Plane
    connection: http.client.HTTPConnection
    seen: Counter[str]

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        self.connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        response = self.connection.getresponse()
        content = response.read()
        self.check(response.status, content)
        return response.status, content

    def check(self, status: int, content: bytes) -> None:
        """Whether the answer is a success or a refusal in an envelope."""
        assert status < 500, content
        if status >= 400:
            error = json.loads(content)["error"]
            assert error["message"]
            assert error["code"] != "INTERNAL"
        assert b'"INTERNAL"' not in content

    def post(self, path: str, body: str, **headers: str) -> None:
        """Send a request to an endpoint that is counted."""
        status, content = self.send("POST", path, body.encode(errors="surrogatepass"), **headers)
        if status >= 400:
            error = json.loads(content)["error"]
            self.seen[error["code"]] += 1
            if status == 400:
                assert error["param"] is not None or error["message"].startswith("the body"), error
        else:
            self.seen["answered"] += 1


@pytest.fixture(scope="module")
def prepared(start_plane: Start) -> Iterator[Setup]:
    plane = start_plane()
    asyncio.run(plane.worker(f"--context-length={CONTEXT}", "--mocker-itl-ms=0.01"))
    connection = http.client.HTTPConnection(plane.frontend.ready["http"])
    yield Setup(plane, connection, Counter())
    connection.close()
    assert not plane.frontend.events_until_now(level="error"), "an input was a bug"


@pytest.mark.parametrize("path", PROMPTS)
@MANY
@example(fields=['"best_of": 1e999'])
@example(fields=[f'"best_of": {DIGITS}'])
@example(fields=[f'"logit_bias": {{"{DIGITS}": 1}}'])
@example(fields=[f'"logit_bias": {{"{"0" * 5000}": 1}}'])
@example(fields=['"tools": ' + "[" * 900 + "]" * 900])
@given(fields=FIELDS)
def test_body_is_answered_or_refused_by_name(prepared: Setup, path: str, fields: list[str]) -> None:
    prepared.post(path, "{" + ", ".join([PROMPTS[path], '"max_tokens": 2', *fields]) + "}")
    prepared.post(path, "{" + ", ".join(fields) + "}")
    if not any(field.startswith('"prompt"') for field in fields):
        prepared.post("/v1/completions", '{"model": "mocker", "prompt": ' + fields[0].partition(": ")[2] + "}")


CONTAINERS = (
    '"messages": [{"role": "user", "content": "Hi", %s}]',
    '"messages": [{%s}]',
    '"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", %s}]}]',
    '"messages": [], "stream_options": {%s}',
    '"messages": [], "response_format": {%s}',
    '"messages": [], "response_format": {"type": "json_schema", "json_schema": {%s}}',
    '"messages": [], "structured_outputs": {%s}',
    '"messages": [], "logit_bias": {%s}',
    '"messages": [], "guided_json": {%s}',
)


@pytest.mark.parametrize("container", CONTAINERS)
@settings(MANY, max_examples=60)
@given(fields=FIELDS)
def test_nested_field_is_honoured_or_refused_by_name(prepared: Setup, container: str, fields: list[str]) -> None:
    prepared.post("/v1/chat/completions", '{"model": "mocker", "max_tokens": 2, ' + container % ", ".join(fields) + "}")


@FEWER
@given(
    timeout=st.sampled_from(("1e999", "nan", "inf", "1e-999", DIGITS, "\xb2", "1_0", "30s", "0x10", "30, x", "")),
    grpc_timeout=st.sampled_from((None, "30S", "0S", "99999999H", "\xb2S", DIGITS, "")),
    limit=st.sampled_from((None, "0", "-1", "1.0", "1e1", DIGITS, "\xb2", "1, 2", "")),
    partial_=st.sampled_from((None, "true", "True", "1", "")),
    content_type=st.sampled_from(
        (None, "application/json; charset=utf-16", "text/plain", ";;;", "multipart/form-data")
    ),
    encoding=st.sampled_from((None, "gzip", "br", "", "identity, gzip")),
)
def test_headers_are_honoured_or_refused_by_name(
    prepared: Setup,
    timeout: str,
    grpc_timeout: str | None,
    limit: str | None,
    partial_: str | None,
    content_type: str | None,
    encoding: str | None,
) -> None:
    named = {
        "X_Request_Timeout": timeout,
        "grpc_timeout": grpc_timeout,
        "x_migration_limit": limit,
        "x_return_partial": partial_,
        "Content_Type": content_type,
        "Content_Encoding": encoding,
    }
    headers = {name: text for name, text in named.items() if text is not None}
    body = "{" + PROMPTS["/v1/completions"] + ', "max_tokens": 1}'

    prepared.post("/v1/completions", body, **headers)


@FEWER
@given(fields=FIELDS, model=st.sampled_from(('"mocker"', '"x"', "null", '""', "1e999")))
def test_thresholds_are_set_or_refused_by_name(prepared: Setup, fields: list[str], model: str) -> None:
    """Not counted: these are not requests for an answer."""
    names = ("active_decode_blocks_threshold", "active_prefill_tokens_threshold")
    values = [field.partition(": ")[2] for field in fields]
    given_ = [f'"{name}": {value}' for name, value in zip(names, values, strict=False)]
    for more in (given_, fields):
        body = "{" + ", ".join([f'"model": {model}', *more]) + "}"
        prepared.send("POST", "/busy_threshold", body.encode(errors="surrogatepass"))


@FEWER
@given(
    name=st.text(max_size=20),
    method=st.sampled_from(("GET", "HEAD", "POST", "OPTIONS", "PUT")),
    query=st.sampled_from(("", "?a=1&a=2", "?n=1e999", "?%00", "??")),
)
def test_path_and_query_are_answered_or_refused(prepared: Setup, name: str, method: str, query: str) -> None:
    quoted = quote(name, safe="", errors="surrogatepass")
    for path in (f"/v1/models/{quoted}", f"/v1/requests/{quoted}/cancel", f"/{quoted}", f"//v1/{quoted}/"):
        prepared.connection.request(method, path + query)
        response = prepared.connection.getresponse()
        content = response.read()
        if method != "HEAD":
            prepared.check(response.status, content)
        assert response.status < 500


FLOATS = st.sampled_from((0.0, -0.0, 1.0, 1e-45, 1e-38, 3e38, float("inf"), float("-inf"), float("nan"), -1.0))
WIDE = st.sampled_from((0, 1, 2, 2**31, 2**32 - 1))
LONG = st.sampled_from((0, 1, 2**53 + 1, 2**63, 2**64 - 1))
WORDS = st.sampled_from(("", "x", "\x00", "é", "\U0001f600", "<|im_end|>", '{"a": 1e999}', '{"a": 1, "a": 2}', "a b"))
MESSAGES = st.builds(
    inference_pb2.GenerateRequest,
    model=st.sampled_from(("mocker", "x", "")),
    text=st.none() | WORDS,
    generated_token_ids=st.lists(WIDE, max_size=2),
    sampling=st.none()
    | st.builds(
        inference_pb2.Sampling,
        temperature=st.none() | FLOATS,
        top_p=st.none() | FLOATS,
        top_k=WIDE,
        min_p=FLOATS,
        seed=st.none() | LONG,
        presence_penalty=FLOATS,
        frequency_penalty=FLOATS,
        repetition_penalty=st.none() | FLOATS,
        logit_bias=st.dictionaries(WIDE, FLOATS, max_size=2),
    ),
    stop=st.builds(
        inference_pb2.Stop,
        strings=st.lists(WORDS, max_size=2),
        token_ids=st.lists(WIDE, max_size=2),
        min_tokens=WIDE,
        max_tokens=st.sampled_from((0, 1, 2, 2**32 - 1)),
    ),
    logprobs=st.none() | WIDE,
    n=st.none() | WIDE,
    guided=st.none()
    | st.builds(inference_pb2.Guided, json_schema=WORDS)
    | st.builds(inference_pb2.Guided, regex=WORDS),
    priority=st.sampled_from((0, -1)),
    choice=WIDE,
    request_id=WORDS,
)
METADATA = st.lists(
    st.tuples(
        st.sampled_from(("x-request-timeout", "x-migration-limit")),
        st.sampled_from(("30s", "1", "nan", "1e999", "9" * 500, "-1", "")),
    ),
    max_size=2,
)


@MANY
@given(message=MESSAGES, metadata=METADATA)
def test_message_is_answered_or_refused_by_name(
    prepared: Setup, message: inference_pb2.GenerateRequest, metadata: list[tuple[str, str]]
) -> None:
    async def ask() -> grpc.aio.AioRpcError | None:
        async with grpc.aio.insecure_channel(prepared.plane.frontend.grpc) as channel:
            try:
                async for _ in inference_pb2_grpc.InferenceStub(channel).Generate(message, metadata=metadata):
                    pass
            except grpc.aio.AioRpcError as error:
                return error
        return None

    error = asyncio.run(ask())
    if error is None:
        prepared.seen["answered"] += 1
        return
    refusal = refusal_from(error)
    assert refusal.code in {"INVALID_ARGUMENT", "NOT_FOUND"}, error
    assert refusal.error["param"]
    prepared.seen[refusal.reason] += 1


def test_each_of_them_was_counted_once_under_its_reason(prepared: Setup) -> None:
    """Runs last: it looks at all that the tests before have sent."""

    async def counted() -> dict[str, float]:
        metric = prepared.plane.frontend.metric
        by_reason = {
            reason: await metric("dynamo_frontend_requests_total", error_type=reason)
            for reason in prepared.seen
            if reason != "answered"
        }
        return {**by_reason, "answered": await metric("dynamo_frontend_requests_total", status="success")}

    assert asyncio.run(counted()) == prepared.seen
