"""Headers name the request, bound its time and its moves."""

import asyncio
import re
from typing import Any

import pytest

from services.http.headers import IDS_AT_ONCE, new_request_id
from services.http.server.config import HttpConfig
from tests.http.support import Script, error_of, run, serving

BODY = {"model": "org/tiny", "prompt": "hi"}


async def ask(headers: dict[str, str], **config: Any) -> tuple[Any, bytes, Script]:
    script = Script("ok")
    async with serving(script, config=HttpConfig(**config)) as server:
        return *await server.post("/v1/completions", BODY, headers=headers), script


@pytest.mark.parametrize("given", ["a", "A-b_c.d:9", "x" * 128])
def test_a_good_request_id_is_kept(given: str) -> None:
    async def test() -> None:
        response, _, script = await ask({"X-Request-Id": given})

        assert response.headers["X-Request-Id"] == script.calls[0].request_id == given

    run(test)


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a/b", "é"])
def test_any_other_is_replaced(given: str | None) -> None:
    async def test() -> None:
        response, _, script = await ask({} if given is None else {"X-Request-Id": given})

        assert response.headers["X-Request-Id"] == script.calls[0].request_id
        assert re.fullmatch("[0-9a-f]{32}", script.calls[0].request_id)

    run(test)


@pytest.mark.parametrize(
    ("header", "configured", "timeout_s"),
    [("2.5", None, 2.5), ("2.5", 9.0, 2.5), (None, 9.0, 9.0), ("86400", None, 86_400.0)],
)
def test_the_deadline_is_the_clients_else_the_configured(
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


def test_there_is_none_unless_someone_sets_it() -> None:
    async def test() -> None:
        assert (await ask({}))[2].calls[0].deadline is None

    run(test)


@pytest.mark.parametrize("given", ["", "0", "-1", "nan", "inf", "soon", "1s", "86401", "1e300"])
def test_a_timeout_that_is_no_time_is_refused(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"X-Request-Timeout": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Request-Timeout"
        assert not script.calls

    run(test)


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("0", 0), ("3", 3), ("007", 7), ("9" * 9, 999_999_999)])
def test_the_migration_limit_is_the_clients_or_none(given: str | None, expected: int | None) -> None:
    async def test() -> None:
        _, _, script = await ask({} if given is None else {"x-migration-limit": given})

        assert script.calls[0].migration_limit == expected

    run(test)


@pytest.mark.parametrize("given", ["", "-1", "1.5", "many", "٣", "1" * 10])
def test_a_migration_limit_that_is_no_number_of_moves_is_refused(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"x-migration-limit": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Migration-Limit"
        assert not script.calls

    run(test)


@pytest.mark.parametrize("given", ["", "1", "yes"])
def test_a_wish_for_partial_answers_is_true_or_false(given: str) -> None:
    async def test() -> None:
        response, body, script = await ask({"x-return-partial": given})

        assert response.status == 400
        assert error_of(body)["param"] == "X-Return-Partial"
        assert not script.calls

    run(test)


def test_ids_are_never_the_same_however_many_are_made_at_once() -> None:
    ids = [new_request_id() for _ in range(3 * IDS_AT_ONCE)]

    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {32}
