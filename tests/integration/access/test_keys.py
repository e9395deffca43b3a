"""With a keys file, every route and rpc asks for a key, over every wire, and shows nothing of another tenant.

Each has a row here. A route or rpc that is new and has none fails the first tests.
"""

import struct
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.access.key import NewKey, make_key
from services.access.keys_edit import add_key, revoke_key
from services.core.errors import Reason
from services.stubs import inference_pb2, inference_pb2_grpc
from tests.integration.access.support import Keyed, bearer, until_status
from tests.integration.conftest import Start
from tests.integration.harness.metrics import read_metrics
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async

COMPLETION = {"model": "mocker", "prompt": "Hello", "max_tokens": 2}
NEEDS_KEY, OPEN, ABSENT = "needs a key", "open", "not implemented by grpcio's health service"
ROUTES: Mapping[tuple[str, str], str] = {
    ("GET", "/health"): OPEN,
    ("GET", "/live"): OPEN,
    ("GET", "/metrics"): OPEN,
    ("GET", "/openapi.json"): NEEDS_KEY,
    ("GET", "/v1/models"): NEEDS_KEY,
    ("GET", "/v1/models/{model}"): NEEDS_KEY,
    ("GET", "/v1/streams/{generation_id}"): NEEDS_KEY,
    ("POST", "/v1/chat/completions"): NEEDS_KEY,
    ("POST", "/v1/completions"): NEEDS_KEY,
    ("POST", "/v1/requests/{request_id}/cancel"): NEEDS_KEY,
    ("GET", "/busy_threshold"): "needs the admin token",
    ("POST", "/busy_threshold"): "needs the admin token",
}
RPCS: Mapping[str, str] = {
    "/unbroken.v1.Inference/Generate": NEEDS_KEY,
    "/unbroken.v1.Inference/Resume": NEEDS_KEY,
    "/unbroken.v1.Inference/Cancel": NEEDS_KEY,
    "/unbroken.v1.Admin/ListBusyThresholds": "needs the admin token",
    "/unbroken.v1.Admin/SetBusyThreshold": "needs the admin token",
    "/grpc.health.v1.Health/Check": OPEN,
    "/grpc.health.v1.Health/List": ABSENT,
    "/grpc.health.v1.Health/Watch": OPEN,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": NEEDS_KEY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": NEEDS_KEY,
}
ARGUMENTS = {"{model}": "mocker", "{generation_id}": "0" * 32, "{request_id}": "r"}
HTTP_WIRES = pytest.mark.parametrize("is_http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])


@pytest.fixture(scope="module")
def keyed(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    return Keyed(start_plane, tmp_path_factory.mktemp("keys"))


def test_each_route_has_a_row(keyed: Keyed) -> None:
    async def routes() -> set[tuple[str, str]]:
        async with keyed.http() as client:
            document = (await client.get("/openapi.json", headers=bearer(keyed.acme))).json()
        return {(method.upper(), path) for path, one in document["paths"].items() for method in one if method != "head"}

    assert run_async(routes()) == set(ROUTES)


def test_each_rpc_has_a_row(keyed: Keyed) -> None:
    async def rpcs() -> set[str]:
        async with grpc.aio.insecure_channel(keyed.plane.frontend.grpc) as channel:
            call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                metadata=[("authorization", f"Bearer {keyed.acme.text}")]
            )
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            names = [one.name for one in (await call.read()).list_services_response.service]
            found = set()
            for name in names:
                await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
                for raw in (await call.read()).file_descriptor_response.file_descriptor_proto:
                    file = FileDescriptorProto.FromString(raw)
                    found |= {
                        f"/{file.package}.{service.name}/{method.name}"
                        for service in file.service
                        for method in service.method
                        if f"{file.package}.{service.name}" in names
                    }
            call.cancel()
        return found

    assert run_async(rpcs()) == set(RPCS)


def path_of(route: str) -> str:
    for name, value in ARGUMENTS.items():
        route = route.replace(name, value)
    return route


@HTTP_WIRES
@pytest.mark.parametrize(("method", "route"), ROUTES, ids=[f"{method} {path}" for method, path in ROUTES])
def test_route_without_a_key_or_with_another_is_refused_unless_it_is_open(
    keyed: Keyed, is_http2: bool, method: str, route: str
) -> None:
    unknown = make_key()

    async def responses() -> list[httpx.Response]:
        async with keyed.http(is_http2=is_http2) as client:
            return [
                await client.request(
                    method, path_of(route), headers=headers, json=COMPLETION if method == "POST" else None
                )
                for headers in ({}, bearer(unknown))
            ]

    found = run_async(responses())

    if ROUTES[method, route] == OPEN:
        assert [one.status_code for one in found] == [200, 200]
        return
    assert [one.status_code for one in found] == [401, 401]
    assert all(one.json()["error"]["code"] == "UNAUTHENTICATED" for one in found)
    assert all(one.headers["www-authenticate"] == "Bearer" for one in found)
    assert not any(part in one.text for one in found for part in (unknown.text, unknown.text.split("_")[2]))


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@HTTP_WIRES
def test_request_with_a_key_is_served(keyed: Keyed, is_http2: bool, header: str) -> None:
    key = keyed.acme.text if header == "x-api-key" else f"Bearer {keyed.acme.text}"

    async def status() -> int:
        async with keyed.http(is_http2=is_http2) as client:
            return (await client.post("/v1/completions", json=COMPLETION, headers={header: key})).status_code

    assert run_async(status()) == 200


def call_of(channel: grpc.aio.Channel, path: str, metadata: Any) -> Any:
    """The rpc with an empty request."""
    return channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)(b"", metadata=metadata)


@pytest.mark.parametrize("rpc", RPCS)
def test_rpc_without_a_key_or_with_another_is_refused_unless_it_is_open(keyed: Keyed, rpc: str) -> None:
    metadata = [None, [("authorization", f"Bearer {make_key().text}")]]

    async def codes() -> list[grpc.StatusCode]:
        async with grpc.aio.insecure_channel(keyed.plane.frontend.grpc) as channel:
            calls = [call_of(channel, rpc, one) for one in metadata]
            if RPCS[rpc] == OPEN:
                return [grpc.StatusCode.OK for call in calls if await call.read() is not None]
            return [await call.code() for call in calls]

    codes_of = {OPEN: grpc.StatusCode.OK, ABSENT: grpc.StatusCode.UNIMPLEMENTED}
    expected = codes_of.get(RPCS[rpc], grpc.StatusCode.UNAUTHENTICATED)
    assert run_async(codes()) == [expected, expected]


@HTTP_WIRES
@pytest.mark.parametrize(
    "rpc", [name for name, needs in RPCS.items() if needs not in (OPEN, ABSENT) and "Reflection" not in name]
)
def test_rpc_over_grpc_web_without_a_key_is_refused(keyed: Keyed, is_http2: bool, rpc: str) -> None:
    async def response() -> httpx.Response:
        async with keyed.http(is_http2=is_http2) as client:
            headers = {"content-type": "application/grpc-web+proto"}
            return await client.post(rpc, content=struct.pack(">BI", 0, 0), headers=headers)

    found = run_async(response())

    unauthenticated = str(grpc.StatusCode.UNAUTHENTICATED.value[0])
    assert f"grpc-status: {unauthenticated}" in found.text or found.headers.get("grpc-status") == unauthenticated


def test_rpc_with_a_key_is_served(keyed: Keyed) -> None:
    async def tokens() -> int:
        async with grpc.aio.insecure_channel(keyed.plane.frontend.grpc) as channel:
            request = inference_pb2.GenerateRequest(model="mocker", text="Hello")
            request.stop.max_tokens = 2
            request.stop.ignore_eos = True
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                request, metadata=[("x-api-key", keyed.acme.text)]
            )
            return sum([len(item.delta.token_ids) async for item in call])

    assert run_async(tokens()) == 2


def running(keyed: Keyed, name: str, key: NewKey) -> Callable[[httpx.AsyncClient], Any]:
    """A stream that goes on until it is cancelled, kept when its client leaves."""
    body = {"model": "mocker", "prompt": "Hello", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": name, "x-on-disconnect": "continue", **bearer(key)}
    return lambda client: client.stream("POST", "/v1/completions", json=body, headers=headers)


@pytest.fixture(scope="module")
def slow(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Keyed:
    """The same with a slow engine, so that a stream is still there when others ask for it."""
    return Keyed(start_plane, tmp_path_factory.mktemp("keys"), "--mocker-itl-ms=20")


async def first_line(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        if line.startswith("data: "):
            return


def test_stream_of_another_tenant_can_be_neither_cancelled_nor_resumed(slow: Keyed) -> None:
    name = "5" * 32

    async def scenario() -> list[Any]:
        async with slow.http() as client, running(slow, name, slow.acme)(client) as stream:
            await first_line(stream.aiter_lines())
            cancel, resume = f"/v1/requests/{name}/cancel", f"/v1/streams/{name}"
            others = [
                (await client.post(cancel, headers=bearer(slow.other))).json()["cancelled"],
                (await client.get(resume, headers=bearer(slow.other))).status_code,
            ]
            own = (await client.post(cancel, headers=bearer(slow.acme))).json()["cancelled"]
            return [*others, own]

    assert run_async(scenario()) == [0, 404, 1]


def test_stream_of_another_tenant_can_be_neither_cancelled_nor_resumed_over_grpc(slow: Keyed) -> None:
    name = "6" * 32

    async def scenario() -> list[Any]:
        async with (
            slow.http() as client,
            running(slow, name, slow.acme)(client) as stream,
            grpc.aio.insecure_channel(slow.plane.frontend.grpc) as channel,
        ):
            await first_line(stream.aiter_lines())
            stub = inference_pb2_grpc.InferenceStub(channel)
            others, own = [[("authorization", f"Bearer {key.text}")] for key in (slow.other, slow.acme)]
            cancel = inference_pb2.CancelRequest(request_id=name)
            resume = stub.Resume(inference_pb2.ResumeRequest(generation_id=name), metadata=others)
            found = [(await stub.Cancel(cancel, metadata=others)).cancelled, await resume.code()]
            return [*found, (await stub.Cancel(cancel, metadata=own)).cancelled]

    assert run_async(scenario()) == [0, grpc.StatusCode.NOT_FOUND, 1]


def test_two_tenants_may_choose_the_same_id(slow: Keyed) -> None:
    """A bug: the later answer took the place of the earlier one, and a cancel ended both."""
    name = "8" * 32

    async def scenario() -> list[Any]:
        async with slow.http() as client, running(slow, name, slow.acme)(client) as acmes:
            lines = acmes.aiter_lines()
            await first_line(lines)
            async with running(slow, name, slow.other)(client) as others:
                await first_line(others.aiter_lines())
            cancel = f"/v1/requests/{name}/cancel"
            found = [(await client.post(cancel, headers=bearer(slow.other))).json()["cancelled"]]
            await first_line(lines)
            return [*found, (await client.post(cancel, headers=bearer(slow.acme))).json()["cancelled"]]

    assert run_async(scenario()) == [1, 1]


def test_tenant_resumes_its_own_stream_with_another_of_its_keys(slow: Keyed) -> None:
    name, second = "7" * 32, add_key(slow.file, "acme")

    async def scenario() -> int:
        async with slow.http() as client:
            async with running(slow, name, slow.acme)(client) as stream:
                await first_line(stream.aiter_lines())

            async def is_known() -> bool:
                return (await client.get("/v1/models", headers=bearer(second))).status_code == 200

            await until(is_known)
            async with client.stream("GET", f"/v1/streams/{name}", headers=bearer(second)) as resumed:
                status = resumed.status_code
            await client.post(f"/v1/requests/{name}/cancel", headers=bearer(slow.acme))
            return status

    assert run_async(scenario()) == 200


def test_tenant_sees_and_uses_only_its_models(start_plane: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[tenants.narrow]\nmodels = ["other"]\n')
    key = add_key(file, "narrow")
    plane = start_plane(frontend=(f"--keys-file={file}",))

    async def scenario() -> list[Any]:
        await plane.worker()
        async with (
            httpx.AsyncClient(base_url=plane.frontend.http, headers=bearer(key), timeout=WAIT_S) as client,
            grpc.aio.insecure_channel(plane.frontend.grpc) as channel,
        ):
            request = inference_pb2.GenerateRequest(model="mocker", text="Hello")
            metadata = [("authorization", f"Bearer {key.text}")]
            return [
                (await client.get("/v1/models")).json()["data"],
                (await client.get("/v1/models/mocker")).status_code,
                (await client.post("/v1/completions", json=COMPLETION)).json()["error"]["code"],
                (await client.get("/health")).json(),
                await inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata).code(),
            ]

    assert run_async(scenario()) == [[], 404, "MODEL_NOT_FOUND", {"status": "ready"}, grpc.StatusCode.NOT_FOUND]


def test_refusals_for_lack_of_a_key_are_counted_over_each_wire(keyed: Keyed) -> None:
    frontend, name = keyed.plane.frontend, "dynamo_frontend_requests_total"

    async def counted() -> float:
        return (await read_metrics(frontend)).sum(name, error_type=Reason.UNAUTHENTICATED)

    async def scenario() -> float:
        before = await counted()
        async with keyed.http() as client, grpc.aio.insecure_channel(frontend.grpc) as channel:
            await client.post("/v1/completions", json=COMPLETION)
            await call_of(channel, "/unbroken.v1.Inference/Generate", None).code()
        return await counted() - before

    assert run_async(scenario()) == 2


def test_key_that_is_revoked_is_refused_and_its_stream_is_finished(slow: Keyed) -> None:
    key = add_key(slow.file, "acme")

    async def scenario() -> list[int]:
        async with slow.http() as client:
            await until_status(client, key, 200)
            body = {"model": "mocker", "prompt": "Hello", "max_tokens": 50, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as stream:
                revoke_key(slow.file, key.id)
                await until_status(client, key, 401)
                lines = [line async for line in stream.aiter_lines()]
            assert "data: [DONE]" in lines
            return [(await client.get("/v1/models", headers=bearer(key))).status_code]

    assert run_async(scenario()) == [401]
