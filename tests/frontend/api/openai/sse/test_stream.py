"""A stream has every token once and in order, as OpenAI's events. A failure before the first event is a response."""

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.core.common_layers import Guard
from services.core.errors import Failure, Reason
from services.core.flow.client_flow import ClientBounds
from services.core.interface import Layer
from services.core.request import FinishReason
from services.frontend.api.openai.sse import stream as stream_module
from services.frontend.api.openai.sse.events import DONE
from services.frontend.api.openai.sse.keepalive import Keepalive
from services.http.h1.connection import Connection
from services.http.server.config import HttpConfig
from tests.http.support import (
    HANG,
    End,
    Flood,
    Say,
    Script,
    StubFrontend,
    bytes_left,
    deaf_client,
    error_of,
    events,
    raw_post,
    run,
    serving,
)

COMPLETION = {"model": "org/tiny", "prompt": "hi", "stream": True}
CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"


def texts(streamed: list[Any]) -> list[str]:
    """The text of each event."""
    choices = [choice for event in streamed if isinstance(event, dict) for choice in event["choices"]]
    return [choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices]


def test_completion_is_text_events_a_finish_event_and_done() -> None:
    async def test() -> None:
        async with serving(Script("Hel", "lo")) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION, headers={"X-Request-Id": "r-1"})

        first, second, last, done = events(body)
        created = first["created"]
        common = {"id": "cmpl-r-1", "object": "text_completion", "created": created, "model": "org/tiny"}
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert response.headers["X-Request-Id"] == "r-1"
        choice = {"index": 0, "logprobs": None, "finish_reason": None}
        assert first == common | {"choices": [choice | {"text": "Hel"}]}
        assert second == common | {"choices": [choice | {"text": "lo"}]}
        assert last == common | {"choices": [choice | {"text": "", "finish_reason": "stop"}]}
        assert done == "[DONE]"

    run(test)


def test_chat_begins_with_the_role_and_ends_with_an_empty_delta() -> None:
    async def test() -> None:
        async with serving(Script("Hel", "lo")) as server:
            _, body = await server.post(CHATS, CHAT, headers={"X-Request-Id": "r-1"})

        *chunks, done = events(body)
        assert {chunk["id"] for chunk in chunks} == {"chatcmpl-r-1"}
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
        assert not any("usage" in chunk for chunk in chunks)
        assert done == "[DONE]"

    run(test)


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, COMPLETION), (CHATS, CHAT)])
def test_usage_comes_once_after_the_finish_and_is_null_before(path: str, body: dict[str, Any]) -> None:
    async def test() -> None:
        async with serving(Script("a", "b")) as server:
            _, answer = await server.post(path, body | {"stream_options": {"include_usage": True}})

        *chunks, usage, done = events(answer)
        assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert done == "[DONE]"

    run(test)


@pytest.mark.parametrize("includes_usage", [True, False])
@pytest.mark.parametrize(("path", "body", "opening"), [(COMPLETIONS, COMPLETION, []), (CHATS, CHAT, [0])])
def test_each_event_has_the_usage_so_far_if_the_client_asks(
    path: str, body: dict[str, Any], opening: list[int], includes_usage: bool
) -> None:
    """GuideLLM and vLLM's own bench count tokens by it: an event may have several."""

    async def test() -> None:
        script = Script("a", Say("bc", tokens=b"bc"), End(0, FinishReason.LENGTH))
        options = {"continuous_usage_stats": True, "include_usage": includes_usage}
        async with serving(script) as server:
            _, answer = await server.post(path, body | {"stream_options": options})

        *chunks, done = events(answer)
        counted = [*opening, 1, 3, 3] + [3] * includes_usage
        assert [chunk["usage"] for chunk in chunks] == [
            {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count} for count in counted
        ]
        assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(opening) + 3) + [0] * includes_usage
        assert done == "[DONE]"

    run(test)


def test_usage_so_far_is_that_of_the_choice_and_the_last_one_that_of_all() -> None:
    async def test() -> None:
        script = Script(Say("a", 0), Say("b", 1), Say("A", 0), Say("AA", 0))
        options = {"continuous_usage_stats": True, "include_usage": True}
        async with serving(script) as server:
            _, answer = await server.post(COMPLETIONS, COMPLETION | {"n": 2, "stream_options": options})

        *chunks, total, _ = events(answer)
        assert [(chunk["choices"][0]["index"], chunk["usage"]["completion_tokens"]) for chunk in chunks] == [
            (0, 1),
            (1, 1),
            (0, 2),
            (0, 3),
            (0, 3),
            (1, 1),
        ]
        assert total["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}

    run(test)


def test_each_choice_opens_and_ends_once_and_the_stream_ends_once() -> None:
    async def test() -> None:
        more = asyncio.Event()
        script = Script(Say("b", 1), 2, Say("a", 0), Say("B", 1), End(1, FinishReason.LENGTH), more, Say("A", 0))
        body = CHAT | {"n": 2, "stream_options": {"include_usage": True}}
        async with serving(script) as server, server.session.post(CHATS, json=body) as response:
            early = await response.content.readuntil(b'"finish_reason":"length"}],"usage":null}\n\n')
            more.set()
            late = await response.content.read()

        *chunks, usage, done = events(early + late)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices] == [
            (1, {"role": "assistant", "content": ""}, None),
            (1, {"content": "b"}, None),
            (0, {"role": "assistant", "content": ""}, None),
            (0, {"content": "a"}, None),
            (1, {"content": "B"}, None),
            (1, {}, "length"),
            (0, {"content": "A"}, None),
            (0, {}, "stop"),
        ]
        assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        assert done == "[DONE]"

    run(test)


def test_failure_of_one_choice_fails_the_stream() -> None:
    async def test() -> None:
        async with serving(Script(Say("b", 1), 2, End(1), Say("a"), 3, Reason.DISCONNECTED)) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION | {"n": 2})

        *chunks, (name, data) = events(body)
        assert texts(chunks) == ["b", "", "a"]
        assert (name, data["error"]["code"]) == ("error", "DISCONNECTED")

    run(test)


def test_text_that_was_held_back_precedes_the_finish_event() -> None:
    async def test() -> None:
        async with serving(Script("a", 2, End(text="held"))) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION)

        *chunks, done = events(body)
        assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
            ("a", None),
            ("held", None),
            ("", "stop"),
        ]
        assert done == "[DONE]"

    run(test)


def test_log_probabilities_are_sent_with_their_tokens_while_text_is_held_back() -> None:
    async def test() -> None:
        script = Script(Say("", tokens=b"a", logprob=-1.0), 2, Say("abc", tokens=b"bc", logprob=-2.0), 2, "d")
        async with serving(script) as server:
            _, completion = await server.post(COMPLETIONS, COMPLETION | {"logprobs": 0})
            _, chat = await server.post(CHATS, CHAT | {"logprobs": True})

        sent = [event["choices"][0]["logprobs"] for event in events(completion)[:-1]]
        assert [one and (one["tokens"], one["text_offset"]) for one in sent] == [
            (["a"], [0]),
            (["b", "c"], [1, 2]),
            None,
            None,
        ]
        sent = [event["choices"][0]["logprobs"] for event in events(chat)[:-1]]
        assert [one and [entry["token"] for entry in one["content"]] for one in sent] == [
            None,
            ["a"],
            ["b", "c"],
            None,
            None,
        ]

    run(test)


def test_delta_without_text_makes_no_event() -> None:
    async def test() -> None:
        async with serving(Script("", "é", "", "!")) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION)

        assert texts(events(body)) == ["é", "!", ""]

    run(test)


def test_answer_without_text_is_a_complete_stream() -> None:
    async def test() -> None:
        async with serving(Script("")) as server:
            _, body = await server.post(CHATS, CHAT)

        opening, finish, done = events(body)
        assert opening["choices"][0]["delta"]["role"] == "assistant"
        assert finish["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"

    run(test)


def test_text_arrives_unchanged_whatever_it_contains() -> None:
    odd = ["\n\n", 'data: "x"\r\n', "\\u0041", "😀", "\u2028\u2029\u0085", "\x00\x1f\x7f", "ü" * 70_000]

    async def test() -> None:
        async with serving(Script(*odd, 1, *odd)) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION)

        assert texts(events(body)) == [*odd, *odd, ""]
        lines = body.decode().splitlines()  # As some clients split.
        assert all(line == "" or line == "data: [DONE]" or json.loads(line.removeprefix("data: ")) for line in lines)

    run(test)


class RecordingTransport:
    """Passes writes on to a transport, and records each in `seen`."""

    def __init__(self, transport: Any, seen: list[bytes]) -> None:
        self._transport = transport
        self._seen = seen

    def write(self, data: bytes) -> None:
        self._seen.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The data of each write to a client."""
    seen: list[bytes] = []
    made = Connection.connection_made

    def record(connection: Connection, transport: Any) -> None:
        recording: Any = RecordingTransport(transport, seen)
        made(connection, recording)

    monkeypatch.setattr(Connection, "connection_made", record)
    return seen


def test_head_and_first_event_are_one_write_and_so_are_last_event_and_end(writes: list[bytes]) -> None:
    """A write costs as much as everything else that is done for a token, and wakes the client."""

    async def test() -> None:
        async with serving(Script("a", 2, "b", 2)) as server:
            await server.post(COMPLETIONS, COMPLETION)

        first, second, last = writes
        assert first.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b'"text":"a"' in first
        assert b'"text":"b"' in second
        assert b'"finish_reason":"stop"' in last
        assert last.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")

    run(test)


def test_answer_without_text_is_one_write(writes: list[bytes]) -> None:
    async def test() -> None:
        async with serving(Script("", 2)) as server:
            await server.post(COMPLETIONS, COMPLETION)

        assert len(writes) == 1

    run(test)


def test_last_event_is_sent_even_if_the_answer_fails_after_it() -> None:
    async def test() -> None:
        async def fail_late(request: Any, call: Any, sink: Any) -> Any:
            await Script("a")(request, call, sink)
            raise Failure(Reason.DRAINING, "as scripted")

        async with serving(fail_late) as server:
            _, body = await server.post(COMPLETIONS, COMPLETION)

        *chunks, (name, _) = events(body)
        assert texts(chunks) == ["a", ""]
        assert name == "error"

    run(test)


def test_first_token_does_not_wait_for_the_second() -> None:
    async def test() -> None:
        more = asyncio.Event()
        async with (
            serving(Script("first", more, "second")) as server,
            server.session.post(COMPLETIONS, json=COMPLETION) as r,
        ):
            first = await r.content.readuntil(b"\n\n")
            more.set()
            rest = await r.content.read()

        assert texts(events(first)) == ["first"]
        assert texts(events(rest)) == ["second", ""]

    run(test)


@pytest.mark.parametrize("reason", list(Reason))
def test_failure_before_the_first_token_has_its_http_status(reason: Reason) -> None:
    async def test() -> None:
        async with serving(Script(2, reason)) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION, headers={"X-Request-Id": "r-1"})

        error = error_of(body)
        traits = Failure(reason, "").traits
        assert response.status == traits.http
        assert response.headers["X-Request-Id"] == error["request_id"] == "r-1"
        assert response.headers.get("Retry-After") == ("2" if traits.http in {429, 503} else None)
        assert (error["code"], error["type"], error["message"]) == (reason, traits.kind, "as scripted")
        assert (error["retryable"], error["hint"]) == (traits.retryable, traits.hint)

    run(test)


@pytest.mark.parametrize("steps", [("a", "b", Reason.DISCONNECTED), ("a", 3, "b", 3, Reason.DISCONNECTED)])
def test_failure_after_the_first_token_is_an_error_event_without_done(steps: tuple[Any, ...]) -> None:
    async def test() -> None:
        async with serving(Script(*steps)) as server:
            response, body = await server.post(COMPLETIONS, COMPLETION)

        *tokens, (name, data) = events(body)
        assert response.status == 200
        assert texts(tokens) == ["a", "b"]
        assert name == "error"
        assert data["error"]["code"] == "DISCONNECTED"
        assert data["error"]["request_id"] == response.headers["X-Request-Id"]

    run(test)


def test_connection_takes_the_next_request_after_an_error_event() -> None:
    """A connection that is closed unannounced costs a client with a connection pool its next request."""

    async def test() -> None:
        async with serving(Script("a", 3, Reason.STALLED)) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION))
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 OK\r\n")

        assert b"event: error" in answer

    run(test)


@pytest.mark.parametrize("guard", [Guard, lambda pipeline: pipeline], ids=["guarded", "unguarded"])
def test_bug_is_an_internal_error_with_its_traceback_in_the_log(guard: Callable[[Layer], Layer]) -> None:
    async def test() -> None:
        async with serving(guard(Script(ValueError("secret")))) as server:
            response, early = await server.post(COMPLETIONS, COMPLETION)
        async with serving(guard(Script("a", 3, ValueError("secret")))) as server:
            _, late = await server.post(COMPLETIONS, COMPLETION)

        assert response.status == 500
        assert error_of(early)["code"] == "INTERNAL"
        assert events(late)[-1][1]["error"]["code"] == "INTERNAL"
        assert b"secret" not in early + late

    with capture_logs() as logs:
        run(test)
    assert [(entry["event"], repr(entry["exc_info"])) for entry in logs] == [("bug", "ValueError('secret')")] * 2


def test_connection_takes_the_next_request_after_a_stream() -> None:
    """A wrong chunk length would break the next response."""

    async def test() -> None:
        async with serving(Script("a", 2, "bé\n", 2, "c")) as server:
            reader, writer = await server.connect()
            for body in (COMPLETION, CHAT, COMPLETION):
                path = CHATS if "messages" in body else COMPLETIONS
                writer.write(raw_post(path, body))
                answer = await reader.readuntil(b"\r\n0\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
                assert b"[DONE]" in answer
            writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 OK\r\n")

    run(test)


@pytest.mark.parametrize("headers", ["", "Connection: keep-alive\r\n"])
def test_http_1_0_client_gets_events_without_chunks_until_the_connection_closes(headers: str) -> None:
    async def test() -> None:
        async with serving(Script("a", 2, "b")) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION, version="1.0", headers=headers))
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")

        assert b"chunked" not in head
        assert texts(events(body)) == ["a", "b", ""]

    run(test)


@pytest.mark.parametrize("steps", [(HANG,), ("a", 3, HANG), ("a", HANG)])
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


def test_request_of_a_client_that_disconnects_while_tokens_come_is_cancelled() -> None:
    async def test() -> None:
        flood = Flood("x" * 1000)
        async with serving(flood) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION))
            await reader.readuntil(b"\n\n")
            writer.transport.abort()
            await flood.cancelled.wait()

    run(test)


def test_client_that_does_not_read_is_disconnected_and_its_request_fails_with_the_reason() -> None:
    async def test() -> None:
        flood = Flood("x" * 50_000)
        async with serving(flood, config=HttpConfig(client=ClientBounds(buffer_bytes_max=2_000_000))) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                await flood.cancelled.wait()
                received = await bytes_left(client)

        assert server.outcomes.seen == [Reason.SLOW_CLIENT], "once it was counted as a client that left"
        assert received < flood.position * len(flood.text) - 1_000_000, "what was unsent was thrown away"

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def test_nothing_is_written_after_a_slow_client_was_given_up() -> None:
    """A layer may deliver many tokens before it is cancelled."""

    async def test() -> None:
        async def burst(request: Any, call: Any, sink: Any) -> Any:
            return await Script("a", 5, *["x" * 1_000_000] * 40)(request, call, sink)

        async with serving(burst, config=HttpConfig(client=ClientBounds(buffer_bytes_max=100_000))) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                assert await bytes_left(client) < 20_000_000

        assert server.outcomes.seen == [Reason.SLOW_CLIENT], "its answer is complete, but the client has not got it"

    run(test)


def test_client_that_does_not_read_the_last_bytes_is_disconnected_in_bounded_time() -> None:
    async def test() -> None:
        config = HttpConfig(client=ClientBounds(buffer_bytes_max=2**30, drain_s_max=0.05))
        async with serving(Script("x" * 20_000_000), config=config) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                while len(asyncio.all_tasks()) < 2:
                    await asyncio.sleep(0)
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0.001)
                assert await bytes_left(client) < 15_000_000

    with capture_logs() as logs:
        run(test)
    assert [entry["reason"] for entry in logs] == ["SLOW_CLIENT"]


def test_request_of_a_client_that_sent_fin_and_does_not_read_is_cancelled() -> None:
    """asyncio reports a lost connection only after the unsent bytes are sent, which never happens here."""

    async def test() -> None:
        flood = Flood("x" * 50_000)
        async with serving(flood, config=HttpConfig(client=ClientBounds(buffer_bytes_max=2**30))) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                while flood.position < 200:
                    await asyncio.sleep(0)
                client.shutdown(socket.SHUT_WR)
                await flood.cancelled.wait()

        assert server.outcomes.seen == [Reason.CANCELLED]

    run(test)


def test_answer_that_ends_after_its_client_sent_fin_causes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        goodbye = asyncio.Event()
        script = Script("x" * 20_000_000, goodbye, 5)
        async with serving(script, config=HttpConfig(client=ClientBounds(buffer_bytes_max=2**30))) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION)) as client:
                await script.running.wait()
                await asyncio.get_running_loop().sock_recv(client, 1)
                client.shutdown(socket.SHUT_WR)
                goodbye.set()
                await bytes_left(client)

    run(test)
    assert not caplog.records


def test_slow_client_does_not_delay_others() -> None:
    async def test() -> None:
        flood = Flood("x" * 50_000)

        async def both(request: Any, call: Any, sink: Any) -> Any:
            layer = flood if call.request_id == "slow" else Script("a", 50, "b")
            return await layer(request, call, sink)

        async with serving(both, config=HttpConfig(client=ClientBounds(buffer_bytes_max=100_000))) as server:
            with deaf_client(server, raw_post(COMPLETIONS, COMPLETION, headers="X-Request-Id: slow\r\n")):
                _, body = await server.post(COMPLETIONS, COMPLETION)
                await flood.cancelled.wait()

        assert texts(events(body)) == ["a", "b", ""]

    run(test)


def test_stream_of_a_draining_frontend_is_the_last_on_its_connection() -> None:
    async def test() -> None:
        async with serving(Script("a"), catalog=StubFrontend(is_draining=True)) as server:
            response, _ = await server.post(COMPLETIONS, COMPLETION)

        assert response.headers["Connection"] == "close"

    run(test)


# Comments in pauses

OFTEN = HttpConfig(sse_keepalive_s=0.02)
COMMENT = b": keepalive\n\n"


def without_comments(body: bytes) -> list[Any]:
    return events(body.replace(COMMENT, b""))


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_comments_come_before_the_first_token_and_between_tokens(version: str) -> None:
    async def test() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        async with serving(Script(first, "a", second, "b"), config=OFTEN) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION, version=version))
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readuntil(COMMENT)
            await reader.readuntil(COMMENT)
            first.set()
            a = await reader.readuntil(b'"text":"a"')
            await reader.readuntil(COMMENT)
            second.set()
            rest = await reader.readuntil(DONE)

        assert head.startswith(f"HTTP/{version} 200 OK\r\n".encode())
        assert (b"Transfer-Encoding: chunked" in head) == (version == "1.1")
        assert b"HTTP/" not in a + rest
        assert b'"text":"b"' in rest

    run(test)


def test_failure_after_a_comment_is_an_error_event() -> None:
    async def test() -> None:
        go = asyncio.Event()
        async with (
            serving(Script(go, Reason.OVERLOADED), config=OFTEN) as server,
            server.session.post(COMPLETIONS, json=COMPLETION) as response,
        ):
            await response.content.readuntil(COMMENT)
            go.set()
            [(name, data)] = without_comments(await response.content.read())

        assert response.status == 200
        assert (name, data["error"]["code"]) == ("error", "OVERLOADED")

    run(test)


def test_failure_before_a_comment_has_its_http_status() -> None:
    async def test() -> None:
        async with serving(Script(3, Reason.OVERLOADED), config=HttpConfig(sse_keepalive_s=60)) as server:
            response, _ = await server.post(COMPLETIONS, COMPLETION)

        assert response.status == 503
        assert response.headers["Retry-After"]

    run(test)


@pytest.mark.parametrize("config", [HttpConfig(), HttpConfig(sse_keepalive_s=60)], ids=["off", "on"])
def test_stream_has_one_timer_if_comments_are_on_and_none_if_they_are_off(
    config: HttpConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Keepalive] = []

    class Recorded(Keepalive):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(stream_module, "Keepalive", Recorded)

    async def test() -> None:
        async with serving(Script("a", 3, "b"), config=config) as server:
            await server.post(COMPLETIONS, COMPLETION)

        assert [keepalive._timer.cancelled() for keepalive in made] == [True] * (config.sse_keepalive_s is not None)

    run(test)


def test_client_that_leaves_in_a_pause_ends_its_request_and_the_comments() -> None:
    async def test() -> None:
        script = Script("a", HANG)
        async with serving(script, config=OFTEN) as server:
            reader, writer = await server.connect()
            writer.write(raw_post(COMPLETIONS, COMPLETION))
            await reader.readuntil(COMMENT)
            writer.close()
            await script.cancelled.wait()

    run(test)
