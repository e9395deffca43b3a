"""A request without a valid key is refused when its head has come, whichever version of HTTP. Its body is discarded."""

import json
from collections.abc import Mapping

import pytest

from services.core.errors import Failure, Reason
from services.core.tenant import Tenant
from services.http.h2.wire.frames import DATA, END_STREAM, ErrorCode, frame
from services.http.server.config import STRANGER_BODY_BYTES_MAX, HttpConfig
from tests.http.h2.support import COMPLETIONS, connected
from tests.http.support import Script, raw_post, run, serving

SIZE = 200_000
"""The size of a body that the server does not read at once."""
BODY = {"model": "org/tiny", "prompt": "hi"}


def tenant_of(headers: Mapping[str, str]) -> Tenant:
    if headers.get("x-api-key") != "right":
        raise Failure(Reason.UNAUTHENTICATED, "this server needs an API key")
    return Tenant(name="acme")


def head(*fields: str, method: str = "POST", path: str = COMPLETIONS) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {SIZE}", *fields, "", ""]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize("expect", [(), ("Expect: 100-continue",)], ids=["", "waits for 100"])
@pytest.mark.parametrize("key", [(), ("X-Api-Key: wrong",)], ids=["no key", "a wrong key"])
def test_request_is_refused_before_its_body_has_come(key: tuple[str, ...], expect: tuple[str, ...]) -> None:
    async def test() -> None:
        async with serving(Script("hello"), tenant_of=tenant_of) as server:
            reader, writer = await server.connect()
            writer.write(head(*key, *expect))

            answer = await reader.readuntil(b"\r\n\r\n")

            assert answer.startswith(b"HTTP/1.1 401 ")
            assert b"Connection: close" in answer

    run(test)


def test_client_that_sends_the_whole_body_first_reads_the_answer_too() -> None:
    async def test() -> None:
        async with serving(Script("hello"), tenant_of=tenant_of) as server:
            reader, writer = await server.connect()
            writer.write(head() + bytes(SIZE))
            await writer.drain()

            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")

    run(test)


def test_connection_stays_open_after_a_refused_request_that_was_complete() -> None:
    async def test() -> None:
        async with serving(Script("hello"), tenant_of=tenant_of) as server:
            reader, writer = await server.connect()
            statuses = []
            for headers in ("", "X-Api-Key: right\r\n", ""):
                writer.write(raw_post(COMPLETIONS, BODY, headers=headers))
                answer = await reader.readuntil(b"\r\n\r\n")
                statuses.append(int(answer.split()[1]))
                await reader.readexactly(int(answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))

            assert statuses == [401, 200, 401]

    run(test)


def test_body_of_a_request_with_a_key_is_waited_for() -> None:
    async def test() -> None:
        async with serving(Script("hello"), tenant_of=tenant_of) as server:
            reader, writer = await server.connect()
            content = json.dumps(BODY).encode().ljust(SIZE)
            writer.write(head("X-Api-Key: right"))
            writer.write(content)

            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    run(test)


def test_request_over_http_2_is_refused_before_its_body_has_come_and_the_rest_is_discarded() -> None:
    async def test() -> None:
        config = HttpConfig(lingering_s_max=0.1)
        async with serving(Script("hello"), tenant_of=tenant_of, config=config) as server, connected(server) as client:
            sends_all = client.open(COMPLETIONS, {"x-api-key": "wrong"}, ends=False)
            sends_no_more = client.open(COMPLETIONS, {"x-api-key": "wrong"}, ends=False)

            answers = [await client.answer(stream_id) for stream_id in (sends_all, sends_no_more)]

            assert [(one.status, one.has_ended, one.reset) for one in answers] == [(401, True, None)] * 2
            client.send(frame(DATA, 0, sends_all, bytes(1000)), frame(DATA, END_STREAM, sends_all, b""))
            await client.until(lambda: client.answers[sends_no_more].reset is not None)
            assert client.answers[sends_no_more].reset is ErrorCode.NO_ERROR, "the rest is not needed"
            assert client.answers[sends_all].reset is None
            served = await client.answer(client.post(COMPLETIONS, BODY, {"x-api-key": "right"}))
            assert served.status == 200

    run(test)


def test_request_without_a_body_is_refused_over_http_2() -> None:
    async def test() -> None:
        async with serving(Script("hello"), tenant_of=tenant_of) as server, connected(server) as client:
            assert (await client.answer(client.get("/v1/models"))).status == 401
            assert (await client.answer(client.get("/live"))).status == 200

    run(test)


def test_preflight_needs_no_key_but_only_from_an_allowed_origin() -> None:
    """A browser sends it without the key that its page will send."""

    async def statuses(*origins: str) -> list[int]:
        config = HttpConfig(cors_origins=("https://chat.example",))
        async with serving(Script("hello"), tenant_of=tenant_of, config=config) as server, connected(server) as client:
            asks = {"access-control-request-method": "POST"}
            return [
                (await client.answer(client.open(COMPLETIONS, asks | {"origin": one}, "OPTIONS", ends=True))).status
                for one in origins
            ]

    async def test() -> None:
        assert await statuses("https://chat.example", "https://evil.example") == [200, 401]

    run(test)


PREFLIGHT = {"origin": "https://chat.example", "access-control-request-method": "POST"}


def test_preflight_without_a_key_does_not_learn_which_paths_there_are() -> None:
    """A bug: that of an unknown path was answered with a list of all."""

    async def test() -> None:
        config = HttpConfig(cors_origins=("https://chat.example",))
        async with serving(Script("hello"), tenant_of=tenant_of, config=config) as server, connected(server) as client:
            answer = await client.answer(client.open("/elsewhere", PREFLIGHT, "OPTIONS", ends=True))

            assert answer.status == 401
            assert "/v1/" not in answer.body.decode()

    run(test)


SMALL: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "health check": ("POST", "/health", {}),
    "metrics": ("GET", "/metrics", {}),
    "preflight": ("OPTIONS", COMPLETIONS, PREFLIGHT),
}


@pytest.mark.parametrize(("method", "path", "fields"), SMALL.values(), ids=SMALL)
def test_large_body_of_a_request_that_needs_no_key_is_not_waited_for(
    method: str, path: str, fields: Mapping[str, str]
) -> None:
    """A bug: each of them could have 64 MiB buffered, without a key."""

    async def test() -> None:
        config = HttpConfig(cors_origins=("https://chat.example",))
        async with serving(Script("hello"), tenant_of=tenant_of, config=config) as server, connected(server) as client:
            reader, writer = await server.connect()
            writer.write(head(*(f"{name}: {value}" for name, value in fields.items()), method=method, path=path))
            assert b"Connection: close" in await reader.readuntil(b"\r\n\r\n")

            stream_id = client.open(path, fields, method, ends=False)
            client.send(frame(DATA, 0, stream_id, bytes(STRANGER_BODY_BYTES_MAX + 1)))
            await client.answer(stream_id)

    run(test)


def test_larger_body_is_taken_where_clients_need_no_keys() -> None:
    async def test() -> None:
        async with serving(Script("hello")) as server, connected(server) as client:
            stream_id = client.open("/metrics", {}, "GET", ends=False)
            client.send(frame(DATA, END_STREAM, stream_id, bytes(STRANGER_BODY_BYTES_MAX + 1)))
            assert (await client.answer(stream_id)).status == 200

    run(test)
