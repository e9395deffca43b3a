"""Variables that other programs or Kubernetes set stop no command, and the log names those that are ignored.

| workload | nemesis | checker |
| --- | --- | --- |
| every command | service links, variables of Dynamo and etcd | each works, with one log line about them |
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_environment import OF_DYNAMO, SERVICE_LINKS
from tests.integration.harness.plane.commands import BARE, Commands, commands, get, wait_served
from tests.integration.harness.waiting import wait_until

FOREIGN = {
    **BARE,
    **SERVICE_LINKS,
    **dict.fromkeys(OF_DYNAMO, "other"),
    "DYN_SYSTEM_PORT": "tcp://10.0.0.1:9090",
    "UNBROKEN_SERVICE_HOST": "10.0.0.1",
    "UNBROKEN_FRONTEND_PORT": "tcp://10.0.0.1:8000",
    "ETCD_ENDPOINTS": "of another program",
    "ETCD_AUTH_CA": "/missing",
    "PROMETHEUS_MULTIPROC_DIR": "/missing",
}
LINES = {
    "service links ignored",
    "service links ignored in variables of options",
    "variables ignored that no option reads",
}


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Commands]:
    with commands(tmp_path, FOREIGN) as started:
        yield started


@pytest.mark.parametrize("processes", [1, 2])
def test_plane_works_beside_the_variables_of_other_programs(plane: Commands, processes: int) -> None:
    registry = plane.registry()
    worker = plane.worker(registry, "--metrics-port=0")
    frontend = plane.frontend(registry, f"--processes={processes}")
    address = frontend.wait_event("frontend ready")["http"]
    wait_served(address)

    assert "dynamo_frontend_requests_total" in get(address, "/metrics")[1]
    for process in (worker, frontend):
        links = process.wait_event("service links ignored in variables of options")
        assert links["variables"] == "DYN_SYSTEM_PORT"
        assert {event: process.log.count(f'"{event}"') for event in LINES} == dict.fromkeys(LINES, 1)
    assert plane.run("chat", f"--url=http://{address}", "--max-tokens=4", text="Hi").returncode == 0
    drained = plane.run("drain", f"--registry={registry}", worker.wait_event("worker ready")["instance"])
    assert drained.returncode == 0, drained.stderr


def test_local_cluster_works_beside_the_variables_of_other_programs(plane: Commands, tmp_path: Path) -> None:
    ports = ("--registry-port=0", "--grpc-port=0", "--http-port=0")
    up = plane.start("up", f"--state-dir={tmp_path / 'run'}", "--log-format=json", "--workers=1", *ports)
    wait_until(lambda: "curl -N http://" in up.log or up.process.poll() is not None, 60)

    assert "curl -N http://" in up.log
    assert {event: up.log.count(f'"{event}"') for event in LINES} == dict.fromkeys(LINES, 1)


@pytest.mark.parametrize("command", ["registry", "worker", "frontend", "up", "drain", "chat", "models"])
def test_misspelt_variable_ends_every_command_in_one_sentence(plane: Commands, command: str) -> None:
    done = plane.run(command, DYN_LOG_LEVLE="debug")

    assert done.returncode == 1
    assert done.stderr == "error: no option reads DYN_LOG_LEVLE: did you mean DYN_LOG_LEVEL?\n"


def test_metrics_port_of_minus_one_is_none(plane: Commands) -> None:
    """NVIDIA Dynamo turns its metrics off in this way."""
    worker = plane.worker("127.0.0.1:1", DYN_SYSTEM_PORT="-1")

    assert "metrics_listen=None" in worker.wait_event("configuration")["config"]
