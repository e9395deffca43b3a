"""Response headers: an answer tells the seed that was used, so that a client can ask for the same answer again."""

from typing import Any

import pytest

from services.core.call import Told
from services.core.errors import Reason
from services.core.tenant import Allowance
from services.core.validation import SEED_MAX
from services.frontend.api.response_headers import HEADERS, allowance_headers, told_headers
from tests.http.support import Script, run, serving

COMPLETION = {"model": "org/tiny", "prompt": "hi"}
PARTIAL = {"X-Return-Partial": "true"}


def told(seed: int | None) -> Told:
    told = Told()
    told.seed = seed
    return told


@pytest.mark.parametrize("seed", [0, 9, SEED_MAX])
def test_seed_is_a_header_in_decimal(seed: int) -> None:
    assert told_headers(told(seed)) == {"x-unbroken-seed": str(seed)}


def test_no_header_is_sent_for_an_engine_without_seeds() -> None:
    assert told_headers(told(None)) == {}


def test_every_header_is_described() -> None:
    everything = told(1)
    everything.generation_id = "0" * 32
    everything.allowances = [Allowance(name, 60, 59, 1.0) for name in ("requests", "tokens")]

    assert told_headers(everything).keys() == HEADERS.keys()


def test_headers_tell_what_a_tenant_has_left() -> None:
    headers = allowance_headers([Allowance("requests", 600, 599, 0.1), Allowance("tokens", 1e6, 0, 60.0)])

    assert headers == {
        "x-ratelimit-limit-requests": "600",
        "x-ratelimit-remaining-requests": "599",
        "x-ratelimit-reset-requests": "0.100s",
        "x-ratelimit-limit-tokens": "1000000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "60.000s",
        "RateLimit-Policy": '"requests";q=600;w=60, "tokens";q=1000000;w=60',
        "RateLimit": '"requests";r=599;t=1, "tokens";r=0;t=60',
    }


@pytest.mark.parametrize("seed", [None, 9])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_have_the_seed_in_their_head(path: str, is_streamed: bool, seed: int | None) -> None:
    body: dict[str, Any] = COMPLETION if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}

    async def test() -> None:
        async with serving(Script("a", "b", seed=seed)) as server:
            response, _ = await server.post(path, {"model": "org/tiny", "stream": is_streamed, **body})

        assert response.status == 200
        assert response.headers.get("x-unbroken-seed") == (None if seed is None else "9")

    run(test)


def test_stream_without_text_has_the_seed_as_well() -> None:
    async def test() -> None:
        async with serving(Script(seed=9)) as server:
            response, _ = await server.post("/v1/completions", {**COMPLETION, "stream": True})

        assert response.headers["x-unbroken-seed"] == "9"

    run(test)


def test_error_with_a_partial_answer_has_the_seed() -> None:
    async def test() -> None:
        async with serving(Script("a", Reason.ENGINE_ERROR, seed=9)) as server:
            response, _ = await server.post("/v1/completions", COMPLETION, headers=PARTIAL)

        assert (response.status, response.headers["x-unbroken-seed"]) == (500, "9")

    run(test)
