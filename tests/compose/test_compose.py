"""`docker compose up` starts a complete plane whose streams survive the loss of containers.

Not part of `make test`, because it needs a Docker engine: use `make compose-test`.
"""

import asyncio
import json
import subprocess
from collections.abc import Callable

import pytest

from tests.clients.conftest import need
from tests.clients.support.toolchains import BUF, GRPCURL
from tests.compose.project import SERVICES, WORKERS, Project, Published
from tests.integration.harness.clients.answers import Answer
from tests.integration.harness.clients.requests import Request
from tests.integration.harness.clients.send import answer, answers_under_fault
from tests.integration.harness.plane.processes import Process, sum_of
from tests.integration.harness.waiting import wait_until

ASK = Request(temperature=0.8, max_tokens=1500)
"""The answer takes at least nine seconds: time to find the container that serves it, and to stop it."""
GENERATE = "unbroken.v1.Inference/Generate"
MESSAGE = json.dumps({"model": "mocker", "text": "The moon", "stop": {"max_tokens": 16}})
TOOL_S_MAX = 60.0
MOVES = "dynamo_frontend_model_migration_total"
RESTART_S_MAX = 60.0


@pytest.fixture(scope="module")
def undisturbed(begun: Project) -> Answer:
    begun.up()
    return asyncio.run(answer(begun.published(), ASK)).essence


def docker_kill(project: Project, worker: str) -> None:
    project.docker("kill", "--signal=KILL", project.container(worker))


def stop(project: Project, worker: str) -> None:
    project.compose("stop", worker)


STRIKES: dict[str, Callable[[Project, str], None]] = {
    "docker-kill": docker_kill,
    "crash": Project.kill_process,
    "stop": stop,
}


def test_second_up_replaces_no_container(begun: Project) -> None:
    before = {service: begun.container(service) for service in SERVICES}

    begun.up()

    assert {service: begun.container(service) for service in SERVICES} == before


def test_each_image_is_built_by_one_service(project: Project) -> None:
    """Regression: when every service built the image, the next `up` replaced all containers."""
    services = json.loads(project.compose("--profile", "*", "config", "--format=json"))["services"].values()

    built = [service["image"] for service in services if "build" in service]

    assert sorted(built) == ["unbroken", "unbroken-trtllm"]
    assert {service["image"] for service in services if service.get("pull_policy") == "never"} == set(built)


def test_all_containers_are_healthy(cluster: Project) -> None:
    assert {service: cluster.state(service).health for service in SERVICES} == dict.fromkeys(SERVICES, "healthy")


@pytest.mark.parametrize("tool", ["grpcurl", "buf"])
def test_tool_on_the_host_streams_through_reflection(cluster: Project, tool: str) -> None:
    address = cluster.published().grpc
    if tool == "grpcurl":
        need(GRPCURL.missing)
        command = [*GRPCURL.command(), "-plaintext", "-d", MESSAGE, address, GENERATE]
    else:
        url = f"http://{address}/{GENERATE}"
        command = [str(BUF), "curl", "--protocol=grpc", "--http2-prior-knowledge", f"--data={MESSAGE}", url]

    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TOOL_S_MAX)

    last = done.stdout.split("\n{")[-1]
    assert '"complete_final": true' in last or '"completeFinal": true' in last.replace('":true', '": true')


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("protocol", ["grpc", "stream"])
def test_stream_is_complete_when_its_container_ends(
    cluster: Project, undisturbed: Answer, protocol: str, strike: str
) -> None:
    published = cluster.published()

    async def disturbed() -> Answer:
        async def fault() -> None:
            await asyncio.to_thread(lambda: STRIKES[strike](cluster, serving(cluster)))

        before = await moves(published)
        (got,) = await answers_under_fault(published, [ASK.named("", protocol=protocol)], fault)
        assert await moves(published) == before + 1
        return got.essence

    assert asyncio.run(disturbed()) == undisturbed


def test_docker_restarts_a_worker_that_crashes(cluster: Project) -> None:
    before = cluster.state("worker-1")

    cluster.kill_process("worker-1")

    def is_back() -> bool:
        state = cluster.state("worker-1")
        return state.restart_count == before.restart_count + 1 and state.health == "healthy"

    wait_until(is_back, RESTART_S_MAX)


def test_stop_lets_streams_finish_and_every_process_exit_by_itself(cluster: Project, undisturbed: Answer) -> None:
    published = cluster.published()

    async def fault() -> None:
        await asyncio.to_thread(lambda: cluster.compose("stop"))

    asks = [ASK.named("", protocol=protocol) for protocol in ("grpc", "stream")]
    got = asyncio.run(answers_under_fault(published, asks, fault))

    assert [one.essence for one in got] == [undisturbed] * 2
    assert {service: cluster.state(service).exit_code for service in SERVICES} == dict.fromkeys(SERVICES, 0)


def serving(project: Project) -> str:
    """Return the worker that runs the only request."""
    (worker,) = [one for one in WORKERS if sum_of(project.metrics(one), "dynamo_engine_request")]
    return worker


async def moves(published: Published) -> float:
    """Return the number of moves of all requests so far."""
    return await Process.metric_at(published.http.removeprefix("http://"), MOVES)
