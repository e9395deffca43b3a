"""Without CORS no header is sent; with it, pages of the named origins read every response but those of admin calls."""

import json
from typing import Any

import pytest

from services.core.errors import Reason
from services.frontend.api.response_headers import HEADERS
from services.http.cors import EXPOSED
from services.http.h1.parser import HEAD_BYTES_MAX
from services.http.server.config import HttpConfig
from tests.http.support import Script, admin_of, run, serving

PAGE = "https://chat.example"
OTHER = "https://elsewhere.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-sdk"}
COMPLETIONS = "/v1/completions"
BODY = {"model": "org/tiny", "prompt": "hi"}


def config(*origins: str) -> HttpConfig:
    return HttpConfig(cors_origins=origins)


def cors_headers(response: Any) -> dict[str, str]:
    """The CORS headers of a response, without their prefix."""
    names = ("Allow-Origin", "Allow-Methods", "Allow-Headers", "Max-Age", "Expose-Headers")
    return {name: value for name in names if (value := response.headers.get(f"Access-Control-{name}"))}


def test_pages_may_read_all_headers_of_answers() -> None:
    assert set(HEADERS) <= set(EXPOSED)


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
def test_no_cors_headers_are_sent_unless_origins_are_configured(method: str) -> None:
    async def test() -> None:
        async with (
            serving(Script("a")) as server,
            server.session.request(method, COMPLETIONS, headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert cors_headers(response) == {}
            assert "Vary" not in response.headers
            assert response.status == (405 if method == "OPTIONS" else 400)

    run(test)


@pytest.mark.parametrize(("origins", "origin"), [((PAGE, "http://b"), PAGE), (("*",), "*")])
def test_preflight_allows_the_methods_of_the_path_and_any_headers(origins: tuple[str, ...], origin: str) -> None:
    async def test() -> None:
        async with (
            serving(Script(), config=config(*origins)) as server,
            server.session.options(COMPLETIONS, headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert response.status == 200
            assert cors_headers(response) == {
                "Allow-Origin": origin,
                "Allow-Methods": "POST",
                "Allow-Headers": "authorization, x-sdk",
                "Max-Age": "600",
                "Expose-Headers": ", ".join(EXPOSED),
            }

    run(test)


@pytest.mark.parametrize(
    ("steps", "path", "body", "status"),
    [
        (("a", "b"), COMPLETIONS, BODY, 200),
        (("a", "b"), COMPLETIONS, BODY | {"stream": True}, 200),
        (("a",), COMPLETIONS, {}, 400),
        ((Reason.OVERLOADED,), COMPLETIONS, BODY, 503),
        ((Reason.OVERLOADED,), COMPLETIONS, BODY | {"stream": True}, 503),
        ((ZeroDivisionError(),), COMPLETIONS, BODY, 500),
        ((), "/nowhere", {}, 404),
    ],
)
def test_pages_of_an_allowed_origin_can_read_every_response(
    steps: tuple[Any, ...], path: str, body: Any, status: int
) -> None:
    async def test() -> None:
        async with serving(Script(*steps), config=config(PAGE)) as server:
            response, _ = await server.post(path, body, headers={"Origin": PAGE})

        assert response.status == status
        assert cors_headers(response) == {"Allow-Origin": PAGE, "Expose-Headers": ", ".join(EXPOSED)}
        assert response.headers["Vary"] == "Origin"

    run(test)


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
def test_pages_of_other_origins_get_no_cors_headers_but_vary(method: str) -> None:
    async def test() -> None:
        headers = {"Origin": OTHER, **PREFLIGHT}
        async with (
            serving(Script("a"), config=config(PAGE)) as server,
            server.session.request(method, COMPLETIONS, data=json.dumps(BODY), headers=headers) as response,
        ):
            assert cors_headers(response) == {}
            assert response.headers["Vary"] == "Origin"
            assert response.status == (405 if method == "OPTIONS" else 200)

    run(test)


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
def test_admin_calls_have_no_cors_headers(method: str) -> None:
    async def test() -> None:
        headers = {"Origin": PAGE, **PREFLIGHT}
        async with (
            serving(Script(), config=config("*"), admin=admin_of()) as server,
            server.session.request(method, "/busy_threshold", headers=headers) as response,
        ):
            assert cors_headers(response) == {}

    run(test)


def test_unknown_path_has_no_preflight() -> None:
    async def test() -> None:
        async with (
            serving(Script(), config=config("*")) as server,
            server.session.options("/nowhere", headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert response.status == 404

    run(test)


@pytest.mark.parametrize(
    ("origins", "sent", "expected"),
    [
        ((), PAGE, {}),
        (("*",), PAGE, {"Allow-Origin": "*"}),
        ((PAGE,), PAGE, {"Allow-Origin": PAGE}),
        ((PAGE,), OTHER, {}),
    ],
)
def test_pages_can_read_the_refusal_of_an_invalid_request(
    origins: tuple[str, ...], sent: str, expected: dict[str, str]
) -> None:
    """Bug: the page saw a CORS error instead of the reason."""

    async def test() -> None:
        async with (
            serving(Script(), config=config(*origins)) as server,
            server.session.get("/live", headers={"Origin": sent, "X-Large": "x" * HEAD_BYTES_MAX}) as response,
        ):
            assert response.status == 431
            exposed = {"Expose-Headers": ", ".join(EXPOSED)} if expected else {}
            assert cors_headers(response) == expected | exposed

    run(test)
