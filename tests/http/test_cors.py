"""CORS: off, nothing of it is said; on, pages of the named origins read every answer, and no page an admin call."""

import json
from typing import Any

import pytest

from services.core.errors import Reason
from services.http.cors import EXPOSED
from services.http.server.config import HttpConfig
from services.http.server.parser import HEAD_BYTES_MAX
from tests.http.support import Script, admin_of, run, serving

PAGE = "https://chat.example"
OTHER = "https://elsewhere.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-sdk"}
COMPLETIONS = "/v1/completions"
ASKED = {"model": "org/tiny", "prompt": "hi"}


def config(*origins: str) -> HttpConfig:
    return HttpConfig(cors_origins=origins)


def said(response: Any) -> dict[str, str]:
    """What is said to the browser."""
    names = ("Allow-Origin", "Allow-Methods", "Allow-Headers", "Max-Age", "Expose-Headers")
    return {name: value for name in names if (value := response.headers.get(f"Access-Control-{name}"))}


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
def test_off_it_says_nothing(method: str) -> None:
    async def test() -> None:
        async with (
            serving(Script("a")) as server,
            server.session.request(method, COMPLETIONS, headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert said(response) == {}
            assert "Vary" not in response.headers
            assert response.status == (405 if method == "OPTIONS" else 400)

    run(test)


@pytest.mark.parametrize(("origins", "origin"), [((PAGE, "http://b"), PAGE), (("*",), "*")])
def test_a_page_may_ask_what_the_path_takes_with_headers_of_its_own(origins: tuple[str, ...], origin: str) -> None:
    async def test() -> None:
        async with (
            serving(Script(), config=config(*origins)) as server,
            server.session.options(COMPLETIONS, headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert response.status == 200
            assert said(response) == {
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
        (("a", "b"), COMPLETIONS, ASKED, 200),
        (("a", "b"), COMPLETIONS, ASKED | {"stream": True}, 200),
        (("a",), COMPLETIONS, {}, 400),
        ((Reason.OVERLOADED,), COMPLETIONS, ASKED, 503),
        ((Reason.OVERLOADED,), COMPLETIONS, ASKED | {"stream": True}, 503),
        ((ZeroDivisionError(),), COMPLETIONS, ASKED, 500),
        ((), "/nowhere", {}, 404),
    ],
)
def test_every_answer_can_be_read(steps: tuple[Any, ...], path: str, body: Any, status: int) -> None:
    async def test() -> None:
        async with serving(Script(*steps), config=config(PAGE)) as server:
            response, _ = await server.post(path, body, headers={"Origin": PAGE})

        assert response.status == status
        assert said(response) == {"Allow-Origin": PAGE, "Expose-Headers": ", ".join(EXPOSED)}
        assert response.headers["Vary"] == "Origin"

    run(test)


@pytest.mark.parametrize("method", ["OPTIONS", "POST"])
def test_pages_of_other_origins_are_not_let_in_and_caches_told_why(method: str) -> None:
    async def test() -> None:
        headers = {"Origin": OTHER, **PREFLIGHT}
        async with (
            serving(Script("a"), config=config(PAGE)) as server,
            server.session.request(method, COMPLETIONS, data=json.dumps(ASKED), headers=headers) as response,
        ):
            assert said(response) == {}
            assert response.headers["Vary"] == "Origin"
            assert response.status == (405 if method == "OPTIONS" else 200)

    run(test)


@pytest.mark.parametrize("method", ["OPTIONS", "GET"])
def test_admin_calls_are_for_no_page(method: str) -> None:
    async def test() -> None:
        headers = {"Origin": PAGE, **PREFLIGHT}
        async with (
            serving(Script(), config=config("*"), admin=admin_of()) as server,
            server.session.request(method, "/busy_threshold", headers=headers) as response,
        ):
            assert said(response) == {}

    run(test)


def test_a_path_that_is_not_there_has_no_preflight() -> None:
    async def test() -> None:
        async with (
            serving(Script(), config=config("*")) as server,
            server.session.options("/nowhere", headers={"Origin": PAGE, **PREFLIGHT}) as response,
        ):
            assert response.status == 404

    run(test)


@pytest.mark.parametrize(
    ("origins", "sent", "said_of_it"),
    [
        ((), PAGE, {}),
        (("*",), PAGE, {"Allow-Origin": "*"}),
        ((PAGE,), PAGE, {"Allow-Origin": PAGE}),
        ((PAGE,), OTHER, {}),
    ],
)
def test_a_page_reads_why_a_head_could_not_be(origins: tuple[str, ...], sent: str, said_of_it: dict[str, str]) -> None:
    """It saw a failure of CORS in place of one that it could do something about."""

    async def test() -> None:
        async with (
            serving(Script(), config=config(*origins)) as server,
            server.session.get("/live", headers={"Origin": sent, "X-Large": "x" * HEAD_BYTES_MAX}) as response,
        ):
            assert response.status == 431
            exposed = {"Expose-Headers": ", ".join(EXPOSED)} if said_of_it else {}
            assert said(response) == said_of_it | exposed

    run(test)
