"""A stock client of HTTP/2, with a state machine of its own (python-hyper's h2), gets the same answers."""

import asyncio
from itertools import count

import httpx
import pytest

from services.http.h2.bounds import keepalive
from services.http.h2.bounds.keepalive import SILENT_LOOKS_MAX, Keepalive
from services.http.server.config import HttpConfig
from tests.http.h2.support import COMPLETION, COMPLETIONS, STREAMED
from tests.http.support import Script, events, run, serving
from tests.support.clock import WAIT_S

PARTS = [f"{number} " * 1000 for number in range(100)]
"""More than the windows of a client that does not read."""


def client_of(port: int) -> httpx.AsyncClient:
    """A client that speaks HTTP/2 without being asked."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", http1=False, http2=True, timeout=WAIT_S)


def test_answers_whole_and_streamed() -> None:
    async def test() -> None:
        async with serving(Script(*PARTS)) as server, client_of(server.port) as client:
            whole = await client.post(COMPLETIONS, json=COMPLETION)
            async with client.stream("POST", COMPLETIONS, json=STREAMED) as streamed:
                body = await streamed.aread()

        assert whole.http_version == "HTTP/2"
        assert whole.json()["choices"][0]["text"] == "".join(PARTS)
        assert "".join(event["choices"][0]["text"] for event in events(body)[:-1]) == "".join(PARTS)

    run(test)


def test_many_streams_on_one_connection() -> None:
    async def test() -> None:
        async with serving(Script("a", 1, "b")) as server, client_of(server.port) as client:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(client.post(COMPLETIONS, json=STREAMED)) for _ in range(50)]
            assert len(server.clients) == 1

        assert {task.result().content.count(b"data: ") for task in tasks} == {4}

    run(test)


def test_program_that_does_something_else_between_two_tokens_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """httpx answers a PING only while it waits for an answer."""
    monkeypatch.setattr(keepalive, "LOOK_S", 0.1)  # Kernels acknowledge a PING within 40 ms.
    look, counted, more = Keepalive._look, count(1), asyncio.Event()

    def note(self: Keepalive) -> None:
        if next(counted) == 3 * SILENT_LOOKS_MAX:
            more.set()
        look(self)

    monkeypatch.setattr(Keepalive, "_look", note)

    async def test() -> None:
        async with (
            serving(Script("a", more, "b")) as server,
            client_of(server.port) as client,
            client.stream("POST", COMPLETIONS, json=STREAMED) as streamed,
        ):
            parts = streamed.aiter_raw()
            body = await anext(parts)
            await more.wait()
            body += b"".join([part async for part in parts])

        assert "".join(event["choices"][0]["text"] for event in events(body)[:-1]) == "ab"

    run(test)


def test_streams_end_as_usual_while_the_server_drains() -> None:
    """Bug: the library closes its connection at a GOAWAY, with all streams on it."""
    more = asyncio.Event()

    async def test() -> None:
        async with (
            serving(Script(PARTS[0], more, *PARTS[1:])) as server,
            client_of(server.port) as client,
            client.stream("POST", COMPLETIONS, json=STREAMED) as first,
            client.stream("POST", COMPLETIONS, json=STREAMED) as second,
        ):
            parts = [first.aiter_raw(), second.aiter_raw()]
            bodies = [await anext(one) for one in parts]

            server.clients.drain()
            beside = await client.get("/v1/models")
            more.set()

            for index, one in enumerate(parts):
                bodies[index] += b"".join([part async for part in one])
            assert beside.status_code == 200
            assert len(server.clients) == 1, "all of them are on one connection"

        for body in bodies:
            assert "".join(event["choices"][0]["text"] for event in events(body)[:-1]) == "".join(PARTS)

    run(test)


def test_large_request() -> None:
    async def test() -> None:
        async with serving(Script("a")) as server, client_of(server.port) as client:
            answer = await client.post(COMPLETIONS, json=COMPLETION | {"prompt": "x" * 3_000_000})

        assert answer.status_code == 200

    run(test)


def test_body_that_is_too_large_gets_its_answer() -> None:
    """Bug: a reset behind the answer hid it."""

    async def test() -> None:
        config = HttpConfig(body_bytes_max=1000)
        async with serving(Script(), config=config) as server, client_of(server.port) as client:
            refused = await client.post(COMPLETIONS, json=COMPLETION | {"prompt": "x" * 3_000_000})

            assert refused.status_code == 413
            assert refused.json()["error"]["code"] == "BODY_TOO_LARGE"
            assert (await client.get("/live")).status_code == 200
            assert len(server.clients) == 1, "the connection goes on"

    run(test)
