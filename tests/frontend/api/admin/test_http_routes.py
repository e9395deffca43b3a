"""`/busy_threshold` reads and sets thresholds; only calls with the token learn what is wrong with them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.core.errors import QUOTED_CHARACTERS_MAX
from services.frontend.api.admin.admin import NOT_FOR_PAGES, Admin, AdminConfig
from services.frontend.api.admin.http_routes import BODY_BYTES_MAX, PATH
from services.frontend.routing.thresholds import AdmissionConfig, BusyThresholds, Thresholds
from services.http.server.config import HttpConfig
from tests.frontend.support import alone
from tests.http.support import Script, Server, error_of, run, serving
from tests.support.doubles import CARD, models_of

DECODE, PREFILL = "active_decode_blocks_threshold", "active_prefill_tokens_threshold"
CONFIGURED = Thresholds(active_decode_blocks=0.5, active_prefill_tokens=100)
TOKEN = {"Authorization": "Bearer secret"}


@asynccontextmanager
async def operated(*, token: str | None = None, is_on: bool = True, **options: Any) -> AsyncIterator[Server]:
    thresholds = BusyThresholds(AdmissionConfig(is_on=is_on, thresholds=CONFIGURED))
    admin = Admin(AdminConfig(token=token), models_of(CARD), thresholds, alone(thresholds))
    async with serving(Script("ok"), admin=admin, **options) as server:
        yield server


def thresholds_of(decode: float | None, prefill: int | None) -> dict[str, Any]:
    return {"model": "m", DECODE: decode, PREFILL: prefill}


@pytest.mark.parametrize(("is_on", "control"), [(True, "token-capacity"), (False, "none")])
def test_get_lists_the_thresholds_of_all_models_and_whether_they_act(is_on: bool, control: str) -> None:
    async def test() -> None:
        async with operated(is_on=is_on) as server:
            response, body = await server.get(PATH)

        assert response.status == 200
        assert json.loads(body) == {"thresholds": [thresholds_of(0.5, 100)], "admission_control": control}

    run(test)


def test_post_sets_the_given_fields_and_answers_all() -> None:
    async def test() -> None:
        async with operated() as server:
            answers = [
                json.loads((await server.post(PATH, {"model": "m"} | change))[1])
                for change in (
                    {},
                    {DECODE: 1},
                    {PREFILL: 0},
                    {DECODE: None},
                    {DECODE: 0.25, PREFILL: None},
                )
            ]
            _, listed = await server.get(PATH)

        expected = [
            thresholds_of(0.5, 100),
            thresholds_of(1, 100),
            thresholds_of(1, 0),
            thresholds_of(None, 0),
            thresholds_of(0.25, None),
        ]
        assert answers == [one | {"admission_control": "token-capacity"} for one in expected]
        assert json.loads(listed)["thresholds"] == [thresholds_of(0.25, None)]

    run(test)


def test_tokens_may_be_written_as_a_fraction() -> None:
    async def test() -> None:
        async with operated() as server:
            _, answer = await server.post(PATH, b'\xef\xbb\xbf{"model": "m", "active_prefill_tokens_threshold": 5e0}')

        assert json.loads(answer)[PREFILL] == 5

    run(test)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "INVALID_ARGUMENT", None),
        (b"", 400, "INVALID_ARGUMENT", None),
        (b"[]", 400, "INVALID_ARGUMENT", None),
        (b"\xff", 400, "INVALID_ARGUMENT", None),
        (b'{"model": "m", "active_decode_blocks_threshold": NaN}', 400, "INVALID_ARGUMENT", None),
        ({}, 400, "INVALID_ARGUMENT", "model"),
        ({"model": 1}, 400, "INVALID_ARGUMENT", "model"),
        (thresholds_of(1.01, None), 400, "INVALID_ARGUMENT", DECODE),
        (thresholds_of(None, -1), 400, "INVALID_ARGUMENT", PREFILL),
        (thresholds_of(None, 2**64), 400, "INVALID_ARGUMENT", PREFILL),
        (thresholds_of(None, 2**100), 400, "INVALID_ARGUMENT", PREFILL),
        ({"model": "m", DECODE: "1"}, 400, "INVALID_ARGUMENT", DECODE),
        ({"model": "m", DECODE: True}, 400, "INVALID_ARGUMENT", DECODE),
        ({"model": "m", PREFILL: 0.5}, 400, "INVALID_ARGUMENT", PREFILL),
        (b'{"model": "m", "active_prefill_tokens_threshold": 1e30}', 400, "INVALID_ARGUMENT", PREFILL),
        (b'{"model": "m", "active_prefill_tokens_threshold": 1e999}', 400, "INVALID_ARGUMENT", PREFILL),
        (b'{"model": "m", "active_prefill_tokens_threshold": ' + b"9" * 5000 + b"}", 400, "INVALID_ARGUMENT", PREFILL),
        (b'{"model": "m", "active_prefill_tokens_threshold": 1, "model": "m"}', 400, "INVALID_ARGUMENT", "model"),
        ({"model": "m", "active_prefill_tokens": 1}, 400, "INVALID_ARGUMENT", "active_prefill_tokens"),
        ({"model": "made up"}, 404, "MODEL_NOT_FOUND", "model"),
        (thresholds_of(0.1, 1) | {"model": "made up"}, 404, "MODEL_NOT_FOUND", "model"),
        (b" " * (BODY_BYTES_MAX + 1), 413, "BODY_TOO_LARGE", None),
    ],
)
def test_invalid_field_is_named_and_changes_nothing(body: Any, status: int, code: str, param: str | None) -> None:
    async def test() -> None:
        async with operated() as server:
            response, answer = await server.post(PATH, body)
            _, listed = await server.get(PATH)

        error = error_of(answer)
        assert (response.status, error["code"], error["param"]) == (status, code, param)
        assert json.loads(listed)["thresholds"] == [thresholds_of(0.5, 100)]

    run(test)


def test_error_of_an_unknown_field_lists_the_fields() -> None:
    async def test() -> None:
        async with operated() as server:
            _, answer = await server.post(PATH, {"model": "m", "x" * 1000: 1})

        message = error_of(answer)["message"]
        assert len(message) < QUOTED_CHARACTERS_MAX + 200
        assert DECODE in message

    run(test)


# Calls without the token


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic secret"}])
@pytest.mark.parametrize(
    ("method", "body"), [("GET", b""), ("POST", b"{"), ("POST", b'{"model": "made up"}'), ("DELETE", b"")]
)
def test_call_without_the_token_is_refused_whatever_else_is_wrong(
    method: str, body: bytes, headers: dict[str, str]
) -> None:
    async def test() -> None:
        async with (
            operated(token="secret") as server,
            server.session.request(method, PATH, data=body, headers=headers) as response,
        ):
            error = error_of(await response.read())

        assert (response.status, error["code"]) == (401, "UNAUTHENTICATED")
        assert response.headers["WWW-Authenticate"] == "Bearer"

    run(test)


@pytest.mark.parametrize("token", [None, "secret"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_in_a_browser_are_refused_with_and_without_the_token(method: str, token: str | None) -> None:
    """A browser sends a POST of plain text to another origin without a preflight request."""

    async def test() -> None:
        headers = {"Origin": "http://evil", "Content-Type": "text/plain", **(TOKEN if token else {})}
        async with operated(token=token) as server:
            body = json.dumps({"model": "m", DECODE: 0.1})
            async with server.session.request(method, PATH, data=body, headers=headers) as response:
                said = await response.read()
            _, listed = await server.get(PATH) if token is None else (None, b"")

        assert response.status == 401
        assert "pages in a browser" in error_of(said)["message"]
        assert error_of(said)["hint"] == NOT_FOR_PAGES, "another token would not help"
        assert token is not None or json.loads(listed)["thresholds"] == [thresholds_of(0.5, 100)]

    run(test)


def test_call_with_the_token_is_served() -> None:
    async def test() -> None:
        async with operated(token="secret") as server:
            set_, _ = await server.post(PATH, {"model": "m"}, headers=TOKEN)
            async with server.session.get(PATH, headers=TOKEN) as listed:
                pass

        assert (set_.status, listed.status) == (200, 200)

    run(test)


def test_clients_need_no_token() -> None:
    async def test() -> None:
        async with operated(token="secret") as server:
            statuses = [(await server.get(path))[0].status for path in ("/live", "/health", "/metrics", "/v1/models")]

        assert statuses == [200] * 4

    run(test)


# An address of its own


def test_admin_address_has_admin_calls_health_metrics_and_their_document_only() -> None:
    async def test() -> None:
        async with operated(is_apart=True) as server:
            statuses = [(await server.get(path))[0].status for path in (PATH, "/live", "/health", "/metrics")]
            _, document = await server.get("/openapi.json")
            _, unknown = await server.get("/v1/models")

        assert statuses == [200] * 4
        assert set(json.loads(document)["paths"]) == {PATH, "/live", "/health", "/metrics", "/openapi.json"}
        assert error_of(unknown)["hint"] == (
            "There are GET /busy_threshold, POST /busy_threshold, GET /health, GET /live, GET /metrics,"
            " GET /openapi.json."
        )

    run(test)


@pytest.mark.parametrize("path", [f"{PATH}/", f"//{PATH[1:]}", PATH.replace("b", "%62")])
def test_other_spellings_of_the_path_are_guarded_too(path: str) -> None:
    async def test() -> None:
        async with operated(token="secret", config=HttpConfig(cors_origins=("*",))) as server:
            status, head = await raw_get(server, path)

        assert status == 401
        assert b"access-control" not in head.lower()

    run(test)


async def raw_get(server: Any, path: str) -> tuple[int, bytes]:
    """The status and the head of the response. An HTTP library would normalise the path."""
    reader, writer = await server.connect()
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nOrigin: http://evil\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), head


def test_admin_address_refuses_calls_without_the_token() -> None:
    async def test() -> None:
        async with operated(is_apart=True, token="secret", config=HttpConfig()) as server:
            response, _ = await server.get(PATH)

        assert response.status == 401

    run(test)


def test_path_is_unknown_if_admin_calls_are_disabled() -> None:
    async def test() -> None:
        async with serving(Script()) as server:
            read, _ = await server.get(PATH)
            set_, _ = await server.post(PATH, {"model": "m"})

        assert (read.status, set_.status) == (404, 404)

    run(test)
