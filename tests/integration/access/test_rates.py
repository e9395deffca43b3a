"""What a tenant may send is shared by all frontends, and a client that obeys a refusal is served."""

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import httpx
import pytest

from services.access.key import NewKey
from services.access.keys_edit import add_key
from services.core.errors import Reason
from services.rpc.status import failure_of
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.access.support import bearer
from tests.integration.conftest import Start
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Frontend
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

PER_MINUTE = 240
PER_SECOND = PER_MINUTE / 60
STORM, AT_ONCE = 1_000, 50
PATIENT = 20
"""A minute, so that a share is used up before some of it has come back."""
ONE = {"model": "mocker", "prompt": "Hello", "max_tokens": 1}
TENANTS = f"""
[tenants.storm]
requests_per_minute = {PER_MINUTE}

[tenants.patient]
requests_per_minute = {PATIENT}

[tenants.words]
tokens_per_minute = 100

[tenants.narrow]
requests_at_once = 2

[tenants.told]
requests_per_minute = 120
tokens_per_minute = 10_000

[tenants.free]
"""


class Limited:
    """A plane of two frontends, with a key of each tenant."""

    def __init__(self, start_plane: Start, folder: Path) -> None:
        file = folder / "keys.toml"
        file.write_text(TENANTS)
        self.keys = {name: add_key(file, name) for name in ("storm", "patient", "words", "narrow", "told", "free")}
        self.plane: Plane = start_plane(frontend=(f"--keys-file={file}",))
        self.frontends: list[Frontend] = [self.plane.frontend, self.plane.start_frontend(f"--keys-file={file}")]
        run_async(self._begin())

    async def _begin(self) -> None:
        worker = await self.plane.worker("--engine-request-limit=100", "--request-queue-limit=100", "--mocker-itl-ms=5")
        for frontend in self.frontends:

            def has_found(frontend: Frontend = frontend) -> bool:
                return frontend.has_found(worker)

            await until(has_found)

            async def shares_with_the_other(frontend: Frontend = frontend) -> bool:
                return await frontend.metric("dynamo_frontend_limit_shares") == 2

            await until(shares_with_the_other)

    def client(self, frontend: int, key: NewKey) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.frontends[frontend].http, headers=bearer(key), timeout=WAIT_S)


@pytest.fixture(scope="module")
def limited(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Limited:
    return Limited(start_plane, tmp_path_factory.mktemp("keys"))


async def storm(limited: Limited) -> tuple[Counter[int], float]:
    """Send many requests at once through both frontends. Returns their statuses, and how long it took."""
    connector = aiohttp.TCPConnector(limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector, headers=bearer(limited.keys["storm"])) as session:

        async def ask(number: int) -> int:
            url = f"{limited.frontends[number % 2].http}/v1/completions"
            async with session.post(url, json=ONE) as response:
                await response.read()
                return response.status

        began = time.monotonic()
        statuses = Counter(await asyncio.gather(*map(ask, range(STORM))))
        return statuses, time.monotonic() - began


def test_storm_over_two_frontends_gets_what_its_tenant_may_have(limited: Limited) -> None:
    statuses, took_s = run_async(storm(limited))

    share_of_a_second = PER_SECOND / 2
    assert statuses.keys() == {200, 429}
    assert PER_MINUTE - share_of_a_second <= statuses[200]
    assert statuses[200] <= PER_MINUTE + PER_SECOND * took_s + share_of_a_second

    async def counted() -> float:
        labels = {"tenant": "storm", "cause": "requests_per_minute"}
        name = "dynamo_frontend_tenant_refusals_total"
        return sum([await one.metric(name, **labels) for one in limited.frontends])

    assert run_async(counted()) == statuses[429]


def test_clients_that_come_again_when_they_are_told_are_served(limited: Limited) -> None:
    async def scenario() -> tuple[list[int], list[float]]:
        async with limited.client(0, limited.keys["patient"]) as client:
            first = [(await client.post("/v1/completions", json=ONE)) for _ in range(PATIENT // 2 + 3)]
            refused = [one for one in first if one.status_code == 429]

            async def obey(response: httpx.Response) -> int:
                await asyncio.sleep(int(response.headers["retry-after-ms"]) / 1e3)
                return (await client.post("/v1/completions", json=ONE)).status_code

            told_s = [int(one.headers["retry-after-ms"]) / 1e3 for one in refused]
            return await asyncio.gather(*map(obey, refused)), told_s

    statuses, told_s = run_async(scenario())

    assert len(statuses) >= 1
    assert statuses == [200] * len(statuses)
    assert told_s == sorted(told_s), "one after another"


def test_refusal_names_the_bound_and_what_is_used(limited: Limited) -> None:
    async def scenario() -> Any:
        async with limited.client(0, limited.keys["words"]) as client:
            told = {"stream": True, "stream_options": {"include_usage": True}}
            stream = ONE | told | {"max_tokens": 200, "ignore_eos": True}
            async with client.stream("POST", "/v1/completions", json=stream) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            return lines, await client.post("/v1/completions", json=ONE)

    lines, refused = run_async(scenario())

    usage = json.loads(lines[-2].removeprefix("data: "))["usage"]
    assert (usage["completion_tokens"], lines[-1]) == (200, "data: [DONE]"), "what was let in is finished"
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (429, Reason.RATE_LIMITED, "rate_limit_error")
    assert error["metadata"]["cause"] == "tokens_per_minute"
    assert error["metadata"]["limit"] == "100"
    assert float(error["metadata"]["value"]) > 200
    assert error["metadata"]["openai_code"] == "rate_limit_exceeded"
    assert refused.headers["x-should-retry"] == "true"
    assert int(refused.headers["retry-after"]) > 60, "the debt of a rate is paid before anything else"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


def test_refusal_over_grpc_has_the_same(limited: Limited) -> None:
    async def scenario() -> Any:
        metadata = [("x-api-key", limited.keys["narrow"].text)]
        async with grpc.aio.insecure_channel(limited.plane.frontend.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(model="mocker", text="Hello")
            request.stop.max_tokens = 100_000
            request.stop.ignore_eos = True
            running = stub.Generate(request, metadata=metadata)
            await running.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:  # The share of two is one.
                await stub.Generate(request, metadata=metadata).read()
            running.cancel()
            await until(lambda: running.done())

            async def is_let_in() -> bool:
                request.stop.max_tokens = 1
                try:
                    return len([one async for one in stub.Generate(request, metadata=metadata)]) > 0
                except grpc.aio.AioRpcError:
                    return False

            await until(is_let_in)
            return caught.value

    error = run_async(scenario())

    failure = failure_of(error, otherwise=Reason.INTERNAL)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.reason is Reason.RATE_LIMITED
    assert failure.metadata == {"cause": "requests_at_once", "limit": "2", "value": "2"}
    assert failure.retry_after_s is not None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_tell_what_is_left(limited: Limited, is_streamed: bool) -> None:
    async def headers(name: str) -> httpx.Headers:
        async with limited.client(1, limited.keys[name]) as client:
            return (await client.post("/v1/completions", json=ONE | {"stream": is_streamed})).headers

    told, of_free = run_async(headers("told")), run_async(headers("free"))

    assert told["x-ratelimit-limit-requests"] == "120"
    assert 0 < int(told["x-ratelimit-remaining-requests"]) < 120
    assert told["x-ratelimit-limit-tokens"] == "10000"
    assert 0 < int(told["x-ratelimit-remaining-tokens"]) < 10_000
    assert told["ratelimit-policy"] == '"requests";q=120;w=60, "tokens";q=10000;w=60'
    assert told["ratelimit"].startswith('"requests";r=')
    assert not [name for name in of_free if "ratelimit" in name]
