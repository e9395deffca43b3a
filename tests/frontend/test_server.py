"""A frontend process answers admin calls only at their configured address, and client calls at the others."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

from services.access.keys_edit import add_key
from services.access.keys_watch import AccessConfig
from services.frontend.api.admin.admin import AdminConfig
from services.frontend.api.admin.grpc_service import SERVICE
from services.frontend.server import Frontend, FrontendConfig
from services.http.h2.wire.frames import GOAWAY
from services.rpc.status import CHANNEL_OPTIONS
from services.runtime.process import StartupError
from services.stubs import admin_pb2, admin_pb2_grpc
from tests.http.h2.support import Listener
from tests.support.doubles import run_async

ANY = "127.0.0.1:0"
NOBODY = "127.0.0.1:1"
READY_POLL_S = 0.005


def configured(ready_file: Path | None, keys_file: Path | None = None, **admin: Any) -> FrontendConfig:
    return FrontendConfig(
        grpc_listen=ANY,
        http_listen=ANY,
        registries=(NOBODY,),
        ready_file=ready_file,
        admin=AdminConfig(**admin),
        access=AccessConfig(keys_file=keys_file),
    )


@asynccontextmanager
async def running(folder: Path, keys_file: Path | None = None, **admin: Any) -> AsyncIterator[dict[str, str]]:
    """Run a frontend. Yields the addresses in its ready file."""
    ready_file, stopping = folder / "ready", asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(Frontend(configured(ready_file, keys_file, **admin)).run(stopping))
        while not ready_file.exists():
            await asyncio.sleep(READY_POLL_S)
        try:
            yield json.loads(ready_file.read_text())
        finally:
            stopping.set()


async def http_status(address: str, path: str, headers: Mapping[str, str] = MappingProxyType({})) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{address}{path}", headers=headers) as response,
    ):
        return response.status


async def services_at(address: str) -> set[str]:
    """The services that reflection lists at `address`."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
    return {service.name for service in answer.list_services_response.service}


async def metrics_of(address: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("method", ["Generate", "Resume"])
def test_rpc_that_cannot_be_decoded_is_counted_as_the_same_is_over_http(tmp_path: Path, method: str) -> None:
    """Bug: only refusals of the handler were outcomes."""

    async def scenario() -> str:
        async with (
            running(tmp_path) as addresses,
            grpc.aio.insecure_channel(addresses["grpc"], options=CHANNEL_OPTIONS) as channel,
        ):
            call: Any = channel.unary_stream(f"/unbroken.v1.Inference/{method}")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff").read()
            return await metrics_of(addresses["http"])

    counted = [line for line in run_async(scenario()).splitlines() if line.startswith("dynamo_frontend_requests_total")]

    assert len(counted) == 1
    assert f'endpoint="{method.lower()}"' in counted[0]
    assert 'error_type="INVALID_ARGUMENT"' in counted[0]
    assert counted[0].endswith(" 1.0")


async def grpc_status(address: str) -> grpc.StatusCode:
    """The status of an admin call to `address`."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        try:
            await stub.ListBusyThresholds(admin_pb2.ListBusyThresholdsRequest())
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


PLACES: dict[str, tuple[dict[str, Any], bool, set[str]]] = {
    # Configuration, whether clients' addresses answer admin calls, and the addresses for admin calls alone.
    "by default": ({}, True, set()),
    "apart": ({"listen": ANY, "grpc_listen": ANY}, False, {"admin_http", "admin_grpc"}),
    "apart at one address": ({"listen": ANY}, False, {"admin_http"}),
    "apart at the other": ({"grpc_listen": ANY}, False, {"admin_grpc"}),
    "off": ({"is_on": False}, False, set()),
    "off, though placed": ({"is_on": False, "listen": ANY, "grpc_listen": ANY}, False, set()),
}


@pytest.mark.parametrize("place", PLACES)
def test_admin_calls_are_answered_only_at_their_configured_address(place: str, tmp_path: Path) -> None:
    """Each address serves HTTP and gRPC alike, so admin calls are not left open to clients over one of them."""
    admin, is_with_clients, apart = PLACES[place]

    async def scenario() -> None:
        async with running(tmp_path, **admin) as addresses:
            assert addresses.keys() == {"grpc", "http"} | apart
            for name, address in addresses.items():
                is_answered, services = is_with_clients or name in apart, await services_at(address)
                assert await http_status(address, "/busy_threshold") == (200 if is_answered else 404)
                assert (await grpc_status(address)).name == ("OK" if is_answered else "UNIMPLEMENTED")
                assert services >= {"grpc.health.v1.Health"}
                assert (SERVICE in services, "unbroken.v1.Inference" in services) == (is_answered, name not in apart)

    run_async(scenario())


def test_admin_calls_are_refused_if_clients_need_keys_and_there_is_no_token(tmp_path: Path) -> None:
    """A bug: they were open to everybody, over HTTP and gRPC."""
    key = add_key(tmp_path / "keys.toml", "acme")

    async def scenario() -> tuple[list[int], grpc.StatusCode]:
        async with running(tmp_path, tmp_path / "keys.toml") as addresses:
            headers: Sequence[dict[str, str]] = ({}, {"authorization": f"Bearer {key.text}"})
            statuses = [await http_status(addresses["http"], "/busy_threshold", one) for one in headers]
            return statuses, await grpc_status(addresses["grpc"])

    assert run_async(scenario()) == ([401, 401], grpc.StatusCode.UNAUTHENTICATED)


def test_admin_address_and_client_address_both_serve_health_and_metrics(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        paths = ("/live", "/health", "/metrics")
        async with running(tmp_path, listen=ANY) as addresses:
            return [await http_status(addresses[name], path) for name in ("http", "admin_http") for path in paths]

    assert run_async(scenario()) == [200, 503, 200] * 2


def test_both_addresses_serve_the_health_of_the_frontend_over_grpc(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        async with running(tmp_path) as addresses:
            found = []
            for address in (addresses["grpc"], addresses["http"]):
                async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
                    found.append(answer.status)
        return found

    assert run_async(scenario()) == [health_pb2.HealthCheckResponse.NOT_SERVING] * 2


@pytest.mark.parametrize("name", ["grpc", "http"])
def test_draining_frontend_tells_its_clients_over_http_2(name: str, tmp_path: Path) -> None:
    """In two steps, so that no request is lost on its way."""

    async def scenario() -> list[int]:
        async with running(tmp_path) as addresses:
            listener = await Listener.at(addresses[name])
        return await listener.kinds_until_closed()

    assert run_async(scenario()).count(GOAWAY) == 2


def test_frontend_logs_its_stop_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path):
            pass

    with capture_logs() as logs:
        run_async(scenario())

    assert logs[-1]["event"] == "frontend stopped"


def test_admin_grpc_address_is_healthy_without_models(tmp_path: Path) -> None:
    async def scenario() -> list[str]:
        async with (
            running(tmp_path, grpc_listen=ANY) as addresses,
            grpc.aio.insecure_channel(addresses["admin_grpc"], options=CHANNEL_OPTIONS) as channel,
        ):
            stub = health_pb2_grpc.HealthStub(channel)
            answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", SERVICE)]
        return [health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) for answer in answers]

    assert run_async(scenario()) == ["SERVING", "SERVING"]


@pytest.mark.parametrize(("name", "option"), [("listen", "--admin-listen"), ("grpc_listen", "--admin-grpc-listen")])
def test_admin_address_in_use_is_reported_with_the_option(name: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        remedy = f"stop the program that uses it, or give another {option}"
        said = f"cannot listen .* on {address}: the port is in use; {remedy}$"
        with pytest.raises(StartupError, match=said):
            run_async(start_at(name, address))


async def start_at(name: str, address: str) -> None:
    await Frontend(configured(None, None, **{name: address})).run(asyncio.Event())
