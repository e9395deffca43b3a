"""A registry process reports its address, starts without etcd, and stops on a signal."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.registry.server import SERVICE
from services.runtime.loop import run_on_loop
from services.stubs.registry_pb2 import ListRequest, WatchRequest
from tests.registry.support import Etcd, Registry, client, free_port, instance, register, started_registry, until
from tests.support.clock import WAIT_S


def test_registry_listens_on_a_free_port_and_writes_it_to_the_ready_file(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started_registry(tmp_path, "--listen", "127.0.0.1:0") as registry:
            address = await registry.address()

            assert re.fullmatch(r"127\.0\.0\.1:[1-9]\d+", address)
            await until(lambda: f"registry ready address={address}" in registry.log())
            async with client(address) as stub:
                assert not (await stub.List(ListRequest())).instances

    run_on_loop(scenario())


def test_registry_serves_health_and_reflection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            started_registry(tmp_path, DYN_REGISTRY_LISTEN="127.0.0.1:0") as registry,
            grpc.aio.insecure_channel(await registry.address()) as channel,
        ):
            assert [await health_of(channel, name) for name in ("", SERVICE)] == ["SERVING", "SERVING"]
            assert b"unbroken.v1.Registry" in (await listed_services(channel)).SerializeToString()

    run_on_loop(scenario())


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def listed_services(channel: grpc.aio.Channel) -> Message:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response: Message = await call.read()
    call.cancel()
    return response


async def send_garbage(method: str, channel: grpc.aio.Channel) -> None:
    """Send bytes that are not a protobuf message, and wait for the answer."""
    kind: Any = channel.stream_stream if method == "Register" else channel.unary_unary
    if method == "Register":
        call = kind(f"/{SERVICE}/{method}")()
        await call.write(b"\xff")
        await call.read()
    else:
        await kind(f"/{SERVICE}/{method}")(b"\xff")


@pytest.mark.parametrize("method", ["Register", "List", "Drain"])
def test_malformed_request_is_refused_with_invalid_argument(tmp_path: Path, method: str) -> None:
    async def scenario() -> None:
        async with (
            started_registry(tmp_path, "--listen", "127.0.0.1:0") as registry,
            grpc.aio.insecure_channel(await registry.address()) as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send_garbage(method, channel)

            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "Traceback" not in registry.log()

    run_on_loop(scenario())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_registry_stops_on_a_signal_while_streams_are_open(tmp_path: Path, number: signal.Signals) -> None:
    async def scenario() -> None:
        async with started_registry(tmp_path, "--listen", "127.0.0.1:0") as registry:
            async with client(await registry.address()) as stub:
                call, watch = stub.Register(), stub.Watch(WatchRequest())
                await call.write(register(instance()))
                await call.read()
                await watch.read()

                registry.process.send_signal(number)

                assert await asyncio.to_thread(registry.wait) == 0
            assert "Traceback" not in registry.log()
            assert registry.log().count("registry stopped") == 1

    run_on_loop(scenario())


def test_registry_reports_a_port_in_use_in_one_sentence_and_exits_with_status_1(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        registry = Registry(tmp_path, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")

        assert registry.wait() == 1
        assert "error: cannot listen for gRPC on 127.0.0.1:" in registry.log()
        assert "Traceback" not in registry.log()


def test_etcd_variables_do_not_select_the_etcd_store(tmp_path: Path) -> None:
    """`ETCD_ENDPOINTS` may be set for other programs."""

    async def scenario() -> None:
        async with started_registry(tmp_path, "--listen", "127.0.0.1:0", ETCD_ENDPOINTS="127.0.0.1:1") as registry:
            await registry.address()

    run_on_loop(scenario())


def test_registry_starts_without_etcd_and_logs_it_once_without_the_password(tmp_path: Path) -> None:
    async def scenario() -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        options = ("--listen", "127.0.0.1:0", "--store", "etcd", "--log-level", "debug", "--etcd-username", "registry")
        async with started_registry(
            tmp_path, *options, ETCD_ENDPOINTS=endpoint, ETCD_AUTH_PASSWORD="hunter2-hunter2"
        ) as registry:
            async with client(await registry.address()) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await stub.List(ListRequest())
            await until(lambda: "etcd not reached yet" in registry.log())
            registry.process.terminate()

            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(registry.wait) == 0
            assert registry.log().count("etcd not reached yet") == 1
            assert endpoint in registry.log()
            assert "hunter2" not in registry.log()

    run_on_loop(scenario())


@pytest.mark.etcd
def test_registry_is_healthy_from_the_first_contact_with_its_store_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        etcd = Etcd(tmp_path)
        options = ("--listen", "127.0.0.1:0", "--store", "etcd", "--etcd-endpoints", etcd.endpoint)
        async with (
            started_registry(tmp_path, *options) as registry,
            grpc.aio.insecure_channel(await registry.address()) as channel,
        ):
            assert [await health_of(channel, name) for name in ("", SERVICE)] == ["NOT_SERVING", "NOT_SERVING"]
            try:
                etcd.start()
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
                while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                    pass
            finally:
                etcd.kill()
            await until(lambda: "the watch on etcd failed" in registry.log())
            assert await health_of(channel, SERVICE) == "SERVING", "it serves its last known state"

    run_on_loop(asyncio.wait_for(scenario(), WAIT_S))


@pytest.mark.etcd
def test_registry_on_etcd_loses_nothing_when_it_is_killed_and_restarted(tmp_path: Path, etcd: Etcd) -> None:
    async def scenario() -> None:
        options = ("--listen", "127.0.0.1:0", "--store", "etcd", "--etcd-endpoints", f"http://{etcd.endpoint}")
        async with started_registry(tmp_path, *options) as registry, client(await registry.address()) as stub:
            call = stub.Register()
            await call.write(register(instance(), 300))
            await call.read()
            seen = await stub.Watch(WatchRequest()).read()
            registry.process.kill()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.read()

        async with started_registry(tmp_path, *options) as registry, client(await registry.address()) as stub:
            await until(lambda: "etcd answers" in registry.log())
            assert (await stub.List(ListRequest())).instances == [instance()]
            assert (await stub.Watch(WatchRequest()).read()).epoch == seen.epoch

    run_on_loop(scenario())


def test_embedded_store_does_not_import_an_etcd_client() -> None:
    program = "import sys, services.cli.registry, services.registry.server; assert 'etcd3aio' not in sys.modules"

    subprocess.run([sys.executable, "-c", program], check=True)
