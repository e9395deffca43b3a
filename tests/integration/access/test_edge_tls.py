"""With a certificate, all ports of a frontend speak TLS: stock clients connect, and streams outlive its renewal."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.stubs import inference_pb2, inference_pb2_grpc
from services.tls.certificate import PairFiles
from tests.integration.conftest import Start
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.tls.support import Certificates

STREAMS = 100
LONG = {"model": "mocker", "prompt": "Hello", "max_tokens": 40, "stream": True, "seed": 7}
OPTIONS = [("grpc.enable_http_proxy", 0)]


class Secured:
    """A plane whose frontend speaks TLS."""

    def __init__(self, start_plane: Start, folder: Path, *options: str, worker: tuple[str, ...] = ()) -> None:
        self.made = Certificates(folder)
        self.files: PairFiles = self.made.pair()
        listen = (
            f"--tls-cert={self.files.cert}",
            f"--tls-key={self.files.key}",
            "--admin-listen=127.0.0.1:0",
            "--log-level=debug",
        )
        self.plane: Plane = start_plane(frontend=(*listen, *options))
        run_async(self.plane.worker(*worker))

    @property
    def base(self) -> str:
        return f"https://{self.plane.frontend.ready['http']}"

    def http(self, *, is_http2: bool = False) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(
            base_url=self.base, verify=self.made.client_context(), http2=is_http2, timeout=WAIT_S, limits=limits
        )

    def channel(self, roots: bytes | None = None) -> grpc.aio.Channel:
        credentials = grpc.ssl_channel_credentials(roots or self.made.ca.read_bytes())
        return grpc.aio.secure_channel(self.plane.frontend.grpc, credentials, options=OPTIONS)


@pytest.fixture(scope="module")
def secured(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(
        start_plane, tmp_path_factory.mktemp("tls"), worker=("--mocker-itl-ms=20", "--engine-request-limit=256")
    )


@pytest.mark.parametrize("is_http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
@pytest.mark.parametrize("name", ["http", "grpc", "admin_http"])
def test_every_port_speaks_tls_over_both_versions(secured: Secured, name: str, is_http2: bool) -> None:
    async def test() -> None:
        async with secured.http(is_http2=is_http2) as client:
            answer = await client.get(f"https://{secured.plane.frontend.ready[name]}/live")

            assert (answer.status_code, answer.http_version) == (200, "HTTP/2" if is_http2 else "HTTP/1.1")

    run_async(test())


def test_grpc_and_grpc_web_are_served(secured: Secured) -> None:
    async def test() -> None:
        async with secured.channel() as channel, secured.http() as client:
            request = inference_pb2.GenerateRequest(model="mocker", text="Hello", stop=inference_pb2.Stop(max_tokens=3))
            call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=WAIT_S)
            items = [item async for item in call]
            web = await client.post(
                f"https://{secured.plane.frontend.grpc}/grpc.health.v1.Health/Check",
                content=bytes(5),
                headers={"content-type": "application/grpc-web+proto"},
            )

            assert len(items) >= 3
            assert b"grpc-status: 0" in web.content.replace(b"grpc-status:0", b"grpc-status: 0")

    run_async(test())


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_curl_connects(secured: Secured, version: str) -> None:
    line = ["curl", "-sS", "--noproxy", "*", version, "--cacert", str(secured.made.ca), f"{secured.base}/health"]

    assert b"ready" in subprocess.run(line, capture_output=True, check=True, timeout=WAIT_S).stdout


def test_client_of_another_ca_is_refused_and_told_why_on_both_sides(secured: Secured, tmp_path: Path) -> None:
    async def test() -> None:
        other = Certificates(tmp_path)
        async with secured.channel(other.ca.read_bytes()) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="CERTIFICATE_VERIFY_FAILED"):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        why = "it hung up during the handshake: it may not accept this process's certificate"
        await until(lambda: secured.plane.frontend.events("a client could not connect over TLS", why=why))

    run_async(test())


def test_client_without_tls_is_refused_and_told_why(secured: Secured) -> None:
    async def test() -> None:
        frontend = secured.plane.frontend
        async with httpx.AsyncClient() as client:
            answer = await client.get(f"http://{frontend.ready['http']}/live")
        async with grpc.aio.insecure_channel(frontend.grpc, options=OPTIONS) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=r"Trying to connect an http1\.x server"):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)

        assert (answer.status_code, answer.text) == (
            400,
            "This port speaks TLS: use https://, or give the gRPC client credentials for TLS.\n",
        )

    run_async(test())


def test_certificate_is_exchanged_under_streams_and_none_breaks(secured: Secured) -> None:
    """Half over HTTP/1.1, a connection each; half over HTTP/2. A broken pair and an expired one come in between."""

    async def test() -> None:
        frontend = secured.plane.frontend
        half = asyncio.Event()
        async with secured.http() as one, secured.http(is_http2=True) as two, asyncio.TaskGroup() as group:
            texts = [group.create_task(_stream(client, half.set)) for client in (one, two) for _ in range(STREAMS // 2)]
            await half.wait()
            exchanged = frontend.events_until_now("a new certificate is in use")
            key = secured.files.key.read_bytes()
            secured.files.key.write_bytes(b"broken")
            await frontend.logged("the new certificate cannot be used: the one before it stays in use")
            secured.files.key.write_bytes(key)
            secured.made.pair(days=30)
            await frontend.logged("a new certificate is in use", len(exchanged) + 1)
            async with secured.http() as late:
                assert (await late.get("/live")).status_code == 200
        assert {text.result() for text in texts} == {texts[0].result()}
        assert texts[0].result().endswith(" data: [DONE]")

    run_async(test())


async def _stream(client: httpx.AsyncClient, on_first: Callable[[], Any]) -> str:
    """The text of a long answer, and how it ended."""
    text, last = "", ""
    async with client.stream("POST", "/v1/completions", json=LONG) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                on_first()
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            last = line or last
    return f"{text} {last}"


def test_expired_certificate_ends_the_start_with_a_sentence(start_plane: Start, tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    files = made.pair(ago=timedelta(days=5))

    with pytest.raises(AssertionError, match=r"edge\.pem cannot be used: it has expired: have a new one made"):
        start_plane(frontend=(f"--tls-cert={files.cert}", f"--tls-key={files.key}"))


def test_metrics_tell_when_the_certificate_expires(secured: Secured) -> None:
    async def test() -> None:
        async with secured.http() as client:
            text = (await client.get("/metrics")).text

        assert "dynamo_frontend_tls_certificate_expiry_timestamp_seconds 1" in text

    run_async(test())


def test_no_log_line_has_a_part_of_the_key(secured: Secured) -> None:
    log = secured.plane.frontend.log_until_now()
    body = "".join(secured.files.key.read_text().splitlines()[1:-1])

    assert "frontend ready" in log
    assert not [start for start in range(len(body) - 16) if body[start : start + 16] in log]
