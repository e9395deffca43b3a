"""Requests are refused by their `Host` and `Origin`, so that no page of elsewhere uses a server through its visitor.

SECURITY.md names these tests.
"""

import asyncio
import json
from typing import Any

import pytest

from services.http.h2.wire.frames import END_HEADERS, END_STREAM, HEADERS, frame
from services.http.host_rule import HostRule
from services.http.server.config import HttpConfig
from tests.http.h2.support import COMPLETION, COMPLETIONS, connected
from tests.http.support import Script, Server, run, serving
from tests.support.clock import WAIT_S

LOCAL = HostRule(is_open=True, is_local=True)
OPEN = HostRule(is_open=True)
KEYED = HostRule()
SERVED, WRONG, STRANGER = 200, 400, 401


def request(target: str, *headers: str, method: str = "GET", version: str = "1.1", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", *headers, *([f"Content-Length: {len(body)}"] if body else []), "", ""]
    return "\r\n".join(lines).encode() + body


async def status_of(server: Server, sent: bytes) -> int:
    reader, writer = await server.connect()
    writer.write(sent)
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


def statuses(rule: HostRule, *sent: bytes, config: HttpConfig | None = None) -> list[int]:
    found: list[int] = []

    async def test() -> None:
        async with serving(Script("hello"), host_rule=rule, config=config) as server:
            found.extend([await status_of(server, one) for one in sent])

    run(test)
    return found


@pytest.mark.parametrize("rule", [KEYED, OPEN, LOCAL], ids=["keys", "no keys", "loopback"])
def test_request_has_one_host(rule: HostRule) -> None:
    """Two servers might take different ones of two, and a request without one is for nobody. RFC 9112, section 3.2."""
    sent = [
        request("/live", "Host: localhost"),
        request("/live"),
        request("/live", "Host: localhost", "Host: localhost"),
        request("/live", "Host: localhost", "Host: evil.example"),
        request("/live", "Host: localhost, evil.example"),
        request("/live", "Host: user@localhost"),
        request("/live", f"Host: {'x' * 256}"),
    ]

    assert statuses(rule, *sent) == [SERVED, *[WRONG] * 6]


def test_request_of_http_1_0_needs_no_host() -> None:
    assert statuses(LOCAL, request("/live", version="1.0")) == [SERVED]


LOOPBACK = [
    "localhost",
    "localhost:8000",
    "LocalHost",
    "localhost.",
    "chat.localhost",
    "127.0.0.1:1",
    "127.1.2.3",
    "[::1]:80",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "192.168.0.1",
    "0.0.0.0",
    "[::2]",
    "127.0.0.1.nip.io",
    "",
]


def test_local_server_without_keys_takes_only_names_of_loopback() -> None:
    """DNS rebinding: a page of evil.example has this name mean 127.0.0.1, and is then of the same origin."""
    sent = [request("/live", f"Host: {one}") for one in [*LOOPBACK, *FOREIGN]]

    assert statuses(LOCAL, *sent) == [SERVED] * len(LOOPBACK) + [WRONG] * len(FOREIGN)
    assert statuses(OPEN, *sent) == [SERVED] * len(sent)
    assert statuses(KEYED, *sent) == [SERVED] * len(sent)


def test_host_of_an_absolute_target_counts() -> None:
    """RFC 9112, section 3.2.2: the field is ignored."""
    sent = [
        request("http://localhost/live", "Host: localhost"),
        request("http://localhost/live", "Host: evil.example"),
        request("http://evil.example/live", "Host: localhost"),
        request("http://evil.example?/live", "Host: localhost"),
        request("http://evil.example@localhost/live", "Host: localhost"),
        request("http://localhost/live"),
    ]

    assert statuses(LOCAL, *sent) == [SERVED, SERVED, WRONG, WRONG, WRONG, WRONG]


def post(origin: str | None, content_type: str, host: str = "localhost:8000") -> bytes:
    """A request that a browser sends for a page without asking first, if the type is a simple one."""
    origins = [] if origin is None else [f"Origin: {origin}"]
    headers = (f"Host: {host}", f"Content-Type: {content_type}", *origins)
    return request(COMPLETIONS, *headers, method="POST", body=json.dumps(COMPLETION).encode())


SIMPLE = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json"]


@pytest.mark.parametrize("content_type", SIMPLE)
@pytest.mark.parametrize("rule", [OPEN, LOCAL], ids=["no keys", "loopback"])
def test_page_of_another_origin_cannot_use_a_server_without_keys(rule: HostRule, content_type: str) -> None:
    origins = ["https://evil.example", "http://localhost:3000", "null", "http://localhost"]
    sent = [post(one, content_type) for one in origins]

    assert statuses(rule, *sent) == [STRANGER] * len(origins)


@pytest.mark.parametrize("origin", [None, "http://localhost:8000", "https://LOCALHOST:8000"])
def test_programs_and_pages_of_the_server_itself_can(origin: str | None) -> None:
    assert statuses(LOCAL, post(origin, "application/json")) == [SERVED]


def test_page_that_cors_allows_can() -> None:
    config = HttpConfig(cors_origins=("https://chat.example",))

    assert statuses(LOCAL, post("https://chat.example", "application/json"), config=config) == [SERVED]
    assert statuses(LOCAL, post("https://evil.example", "application/json"), config=config) == [STRANGER]


def test_request_of_a_page_is_refused_before_its_body_has_come() -> None:
    sent = request(
        COMPLETIONS, "Host: localhost", "Origin: https://evil.example", "Content-Length: 1000", method="POST"
    )

    assert statuses(LOCAL, sent) == [STRANGER]


def test_same_holds_over_http_2() -> None:
    async def status(headers: dict[str, str]) -> int:
        async with serving(Script("hello"), host_rule=LOCAL) as server, connected(server) as client:
            block = client.encode([(":method", "GET"), (":scheme", "http"), (":path", "/live"), *headers.items()])
            return await asked(client, block)

    async def test() -> None:
        assert [
            await status({":authority": "localhost"}),
            await status({":authority": "evil.example"}),
            await status({":authority": "localhost", "origin": "https://evil.example"}),
        ] == [SERVED, WRONG, STRANGER]

    run(test)


async def asked(client: Any, block: bytes) -> int:
    """The status of a request with these fields."""
    stream_id, client._next_id = client._next_id, client._next_id + 2
    client.send(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block))
    status: int = (await asyncio.wait_for(client.answer(stream_id), WAIT_S)).status
    return status
