"""No answer, log line or metric of any process has a key, its hash, or a part of either but the key's id."""

import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import suppress
from typing import Any

import grpc
import httpx
import pytest

from services.access.key import NewKey, make_key
from services.access.keys_edit import add_key, revoke_key
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.access.support import TOKEN, Keyed, bearer, until_status
from tests.integration.conftest import Start
from tests.integration.harness.metrics import read_metrics
from tests.support.doubles import run_async

PART_CHARACTERS = 12
"""A part of a secret this long does not occur by chance."""
COMPLETION = {"model": "mocker", "prompt": "Hello", "max_tokens": 2}
FIELD = "value-of-a-header-field"
WEB = {"content-type": "application/grpc-web+proto"}


@pytest.fixture(scope="module")
def keyed(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    narrow = "[tenants.narrow]\nrequests_per_minute = 1\n"
    return Keyed(start_plane, tmp_path_factory.mktemp("keys"), "--log-level=debug", tenants=narrow)


def parts(secret: str) -> Iterator[str]:
    for start in range(len(secret) - PART_CHARACTERS + 1):
        yield secret[start : start + PART_CHARACTERS]


def secrets_of(key: NewKey) -> list[str]:
    """What of a key nobody may see. Its id is no secret."""
    return [key.text.split("_")[2], key.sha256]


def leaked(text: str, keys: list[NewKey]) -> list[str]:
    """The ids of the keys of which the text has a part."""
    return [key.id for key in keys if any(part in text for secret in secrets_of(key) for part in parts(secret))]


def test_part_of_a_key_is_found() -> None:
    key = make_key()

    assert leaked(f"key {key.text[20:40]}", [key, make_key()]) == [key.id]
    assert leaked(f"hash {key.sha256[:20]}", [key]) == [key.id]
    assert leaked(f"key ub_{key.id}", [key]) == []


def headers_with(key: NewKey) -> list[Mapping[str, str]]:
    """Ways of sending a key, right and wrong ones."""
    return [
        bearer(key),
        {"x-api-key": key.text},
        {"authorization": f"Basic {key.text}"},
        {"authorization": key.text},
        {"authorization": f"Bearer {key.text}", "x-api-key": key.text},
        {"authorization": f"Bearer {key.text[:-3]}"},
        {"authorization": f"Bearer {key.text[:-1]}0"},
        {"authorization": f"Bearer  {key.text} {key.text}"},
        {"authorization": f"Bearer {key.text.upper()}"},
        {"authorization": f"Bearer {key.text}", "content-type": "text/plain; charset=latin-1"},
    ]


async def answers_over_http(keyed: Keyed, keys: list[NewKey]) -> AsyncIterator[str]:
    for is_http2 in (False, True):
        async with keyed.http(is_http2=is_http2) as client:
            for headers in [{**one, "x-other": FIELD} for key in keys for one in headers_with(key)]:
                yield told(await client.post("/v1/completions", json=COMPLETION, headers=headers))
                yield told(await client.post("/v1/completions", content=b"{", headers=headers))
                yield told(await client.get("/v1/models/none", headers=headers))
                yield told(await client.get(f"/v1/streams/{'0' * 32}", headers=headers))
                yield told(await client.get("/nothing", headers=headers))
                yield told(await client.get("/busy_threshold", headers=headers))
                empty = struct.pack(">BI", 0, 0)
                yield told(
                    await client.post("/unbroken.v1.Inference/Generate", content=empty, headers={**headers, **WEB})
                )
            yield told(await client.get("/busy_threshold", headers={"authorization": f"Bearer {TOKEN}"}))
            yield told(await client.get("/openapi.json", headers=bearer(keys[0])))


def told(response: httpx.Response) -> str:
    return f"{response.status_code} {response.headers.multi_items()} {response.text}"


async def answers_over_grpc(keyed: Keyed, keys: list[NewKey]) -> AsyncIterator[str]:
    async with grpc.aio.insecure_channel(keyed.plane.frontend.grpc) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for headers in [one for key in keys for one in headers_with(key)]:
            metadata = [(name, value) for name, value in headers.items() if name != "content-type"]
            metadata.append(("x-other", FIELD))
            for model in ("mocker", "none"):
                request = inference_pb2.GenerateRequest(model=model, text="Hello")
                request.stop.max_tokens = 1
                call: Any = stub.Generate(request, metadata=metadata)
                with suppress(grpc.aio.AioRpcError):  # Its status is read below.
                    yield str([one async for one in call])
                code = await call.code()
                yield f"{code} {await call.details()} {await call.initial_metadata()} {await call.trailing_metadata()}"


def test_no_output_has_a_part_of_a_key(keyed: Keyed) -> None:
    plane = keyed.plane
    revoked, narrow = add_key(keyed.file, "acme"), add_key(keyed.file, "narrow")
    keys = [keyed.acme, keyed.other, narrow, revoked, make_key()]

    async def outputs() -> list[str]:
        async with keyed.http() as client:
            await until_status(client, revoked, 200)
            revoke_key(keyed.file, revoked.id)
            await until_status(client, revoked, 401)
            found = [one async for one in answers_over_http(keyed, keys)]
            found += [one async for one in answers_over_grpc(keyed, keys)]
            found += [(await read_metrics(one)).text for one in (plane.frontend, keyed.worker)]
        return found

    answers = run_async(outputs())
    logs = [process.log_until_now() for process in plane.processes]

    statuses = {one.split()[0] for one in answers if one[0].isdigit()}
    assert {"200", "400", "401", "404", "429"} <= statuses, "each kind of answer is seen"
    assert all(key.id in logs[1] for key in keys[3:]), "the log says which keys were refused"
    assert not any(FIELD in one for one in [*answers, *logs]), "no header field is repeated or logged"
    assert [leaked(one, keys) for one in [*answers, *logs] if leaked(one, keys)] == []
