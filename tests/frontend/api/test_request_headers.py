"""Request headers set the id, the deadline and the migration limit of a call; invalid ones are refused by name."""

import asyncio
import re
from typing import Any

import pytest

from services.frontend.api.openapi.operations import OPERATIONS
from services.frontend.api.request_headers import HEADERS, is_done, resume_of
from services.http.server.config import HttpConfig
from services.http.server.messages import HttpRequest
from tests.http.support import Script, error_of, run, serving

BODY = {"model": "org/tiny", "prompt": "hi"}


async def ask(headers: dict[str, str], **config: Any) -> tuple[Any, bytes, Script]:
    script = Script("ok")
    async with serving(script, config=HttpConfig(**config)) as server:
        return *await server.post("/v1/completions", BODY, headers=headers), script


@pytest.mark.parametrize("given", ["a", "A-b_c.d:9", "x" * 128])
def test_request_id_of_the_client_names_the_call_and_the_response(given: str) -> None:
    async def test() -> None:
        response, _, script = await ask({"X-Request-Id": given})

        assert response.headers["X-Request-Id"] == script.calls[0].request_id == given

    run(test)


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a/b", "é"])
def test_new_request_id_names_the_call_and_the_response(given: str | None) -> None:
    async def test() -> None:
        response, _, script = await ask({} if given is None else {"X-Request-Id": given})

        assert response.headers["X-Request-Id"] == script.calls[0].request_id
        assert re.fullmatch("[0-9a-f]{32}", script.calls[0].request_id)

    run(test)


@pytest.mark.parametrize(
    ("header", "configured", "timeout_s"),
    [("2.5", None, 2.5), ("2.5", 9.0, 2.5), (None, 9.0, 9.0), ("86400", None, 86_400.0), ("30s", 9.0, 30.0)],
)
def test_deadline_comes_from_the_header_or_from_the_configuration(
    header: str | None, configured: float | None, timeout_s: float
) -> None:
    async def test() -> None:
        before = asyncio.get_running_loop().time()
        headers = {} if header is None else {"X-Request-Timeout": header}
        _, _, script = await ask(headers, request_timeout_s=configured)

        deadline = script.calls[0].deadline
        assert deadline is not None
        assert before + timeout_s <= deadline <= asyncio.get_running_loop().time() + timeout_s

    run(test)


def test_call_has_no_deadline_without_header_and_configuration() -> None:
    async def test() -> None:
        assert (await ask({}))[2].calls[0].deadline is None

    run(test)


@pytest.mark.parametrize("given", ["", "0", "-1", "nan", "inf", "soon", "86401", "1e300", "٣", "25h"])
def test_invalid_timeout_is_refused(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"X-Request-Timeout": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Request-Timeout"
        assert not script.calls

    run(test)


def test_lower_one_of_two_timeouts_counts() -> None:
    async def test() -> None:
        before = asyncio.get_running_loop().time()
        _, _, script = await ask({"X-Request-Timeout": "1m", "grpc-timeout": "30S"})

        deadline = script.calls[0].deadline
        assert deadline is not None
        assert before + 30 <= deadline <= asyncio.get_running_loop().time() + 30

    run(test)


@pytest.mark.parametrize("given", ["", "30", "30s", "0S", "123456789n", "1.5S", "99999999H"])
def test_invalid_timeout_of_grpc_is_refused(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"grpc-timeout": given})

        assert response.status == 400
        assert error_of(body)["param"] == "grpc-timeout"
        assert not script.calls

    run(test)


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("0", 0), ("3", 3), ("007", 7), ("9" * 9, 999_999_999)])
def test_migration_limit_comes_from_the_header(given: str | None, expected: int | None) -> None:
    async def test() -> None:
        _, _, script = await ask({} if given is None else {"x-migration-limit": given})

        assert script.calls[0].migration_limit == expected

    run(test)


@pytest.mark.parametrize("given", ["", "-1", "1.5", "many", "٣", "1" * 10])
def test_invalid_migration_limit_is_refused(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"x-migration-limit": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Migration-Limit"
        assert not script.calls

    run(test)


@pytest.mark.parametrize("given", ["", "1", "yes"])
def test_return_partial_is_refused_unless_true_or_false(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"x-return-partial": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Return-Partial"
        assert not script.calls

    run(test)


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [("text/event-stream", True), ("*/*", True), (None, True), ("application/json", False)],
)
def test_client_with_the_last_id_gets_no_events_and_may_get_the_whole_answer(
    accepted: str | None, expected: bool
) -> None:
    headers = {"last-event-id": "done", "x-request-id": "0" * 32}
    request = HttpRequest(method="POST", path="/", headers=headers | ({"accept": accepted} if accepted else {}))

    assert is_done(request) == expected
    assert resume_of(request) == (bytes(16), None)


def test_openapi_document_lists_every_header_at_both_endpoints() -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert OPERATIONS["POST", path].headers == HEADERS
