"""Processes with certificates of their roles serve as they do without; those with none, or others, come to nothing."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import httpx
import pytest

from services.rpc.secure.channels import open_channel
from services.stubs import inference_pb2, inference_pb2_grpc
from services.tls.peers import PeerFiles
from services.tls.roles import Role
from tests.integration.conftest import Start
from tests.integration.harness.plane.plane import Plane
from tests.integration.harness.plane.processes import Process
from tests.integration.harness.waiting import until
from tests.support.clock import WAIT_S
from tests.support.doubles import run_async
from tests.tls.support import Certificates, peer_files, peers_of

STREAMS = 100
LONG = {"model": "mocker", "prompt": "Hello", "max_tokens": 60, "stream": True, "seed": 7, "ignore_eos": True}


def options(files: PeerFiles) -> tuple[str, ...]:
    return (f"--peer-cert={files.cert}", f"--peer-key={files.key}", f"--peer-ca={files.ca}")


class Secured:
    """A plane whose processes have certificates, with one worker."""

    def __init__(self, start_plane: Start, folder: Path) -> None:
        self.made = Certificates(folder)
        self.files = {role: peer_files(self.made, role) for role in Role}
        self.plane: Plane = start_plane(
            registry=options(self.files[Role.REGISTRY]), frontend=options(self.files[Role.FRONTEND])
        )
        self.worker: Process = run_async(self.start_worker())

    async def start_worker(self) -> Process:
        engine = ("--mocker-itl-ms=20", "--engine-request-limit=256")
        return await self.plane.worker(*options(self.files[Role.WORKER]), *engine)

    async def stream(self, client: httpx.AsyncClient) -> str:
        """The last line of a long answer."""
        last = ""
        async with client.stream("POST", "/v1/completions", json=LONG) as answer:
            async for line in answer.aiter_lines():
                last = line or last
        return last


@pytest.fixture(scope="module")
def secured(start_plane: Start, tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(start_plane, tmp_path_factory.mktemp("peers"))


def test_certificates_are_exchanged_and_a_worker_lost_under_streams_and_none_breaks(secured: Secured) -> None:
    async def test() -> None:
        plane = secured.plane
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=plane.frontend.http, timeout=WAIT_S, limits=limits) as client:
            async with asyncio.TaskGroup() as group:
                streams = [group.create_task(secured.stream(client)) for _ in range(STREAMS)]
                for role in (Role.FRONTEND, Role.WORKER, Role.REGISTRY):
                    peer_files(secured.made, role, days=30)
                for process in (plane.frontend, secured.worker, plane.registry):
                    await process.logged("a new certificate is in use")
                other = await secured.start_worker()
                secured.worker.kill()
            secured.worker = other

        assert {stream.result() for stream in streams} == {"data: [DONE]"}

    run_async(test())


def test_worker_without_certificate_and_one_of_another_ca_are_not_registered(secured: Secured, tmp_path: Path) -> None:
    async def test() -> None:
        other = peer_files(Certificates(tmp_path), Role.WORKER)
        plain, foreign = secured.plane.launch(), secured.plane.launch(*options(other))

        for worker in (plain, foreign):
            [line] = await worker.logged("registry not reached yet: trying again")
            assert "UNAVAILABLE: the " in line["why"]
        assert not secured.plane.frontend.has_found(plain)
        assert not secured.plane.frontend.has_found(foreign)
        plain.kill()
        foreign.kill()

    run_async(test())


@pytest.mark.parametrize("role", [Role.FRONTEND, Role.WORKER, Role.REGISTRY, None])
def test_inference_of_a_worker_is_not_for_other_roles(secured: Secured, role: Role | None) -> None:
    async def test() -> None:
        peers = None if role is None else peers_of(secured.made, role, name="caller")
        async with open_channel(secured.worker.ready["address"], peers, Role.WORKER) as channel:
            request = inference_pb2.GenerateRequest(model="mocker", text="Hello")
            with pytest.raises(grpc.aio.AioRpcError) as found:
                await inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=WAIT_S).read()

        expected = grpc.StatusCode.UNAVAILABLE if role is None else grpc.StatusCode.PERMISSION_DENIED
        assert found.value.code() is expected

    run_async(test())


def test_operator_drains_a_worker_and_a_process_without_certificate_does_not(secured: Secured) -> None:
    async def test() -> None:
        instance = secured.worker.ready["instance_id"]

        assert await secured.plane.run("drain", instance) == 1
        assert await secured.plane.run("drain", *options(secured.files[Role.OPERATOR]), instance) == 0
        await until(lambda: secured.worker.status() == 0)
        secured.worker = await secured.start_worker()

    run_async(test())


def test_expired_certificate_ends_the_start_with_a_sentence(start_plane: Start, tmp_path: Path) -> None:
    files = peer_files(Certificates(tmp_path), Role.REGISTRY, ago=timedelta(days=5))

    with pytest.raises(AssertionError, match=r"registry\.pem cannot be used: it has expired: have a new one made"):
        start_plane(registry=options(files))
