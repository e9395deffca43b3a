"""Supervisor is ready when all its processes are, and explains why it cannot start."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.frontend.processes.supervisor import Command, Supervisor, SupervisorConfig
from services.runtime.process import StartupError
from tests.support.doubles import run_async

GRPC, HTTP = "--grpc-listen", "--http-listen"
SERVES = (
    "import json, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    "pathlib.Path(sys.argv[1]).write_text(sys.argv[2]); time.sleep(60)"
)
POLL_S = 0.01


def running(script: str) -> Command:
    """A command for processes that run `script` with their ready file, its content, and their name as arguments."""

    def command(addresses: Mapping[str, str], member: Path, ready_file: Path) -> Sequence[str]:
        ready = {"grpc": addresses[GRPC], "http": addresses[HTTP]}
        return [sys.executable, "-c", script, str(ready_file), json.dumps(ready), member.name]

    return command


def configured(
    command: Command, ready_file: Path | None = None, listens: Mapping[str, str] | None = None
) -> SupervisorConfig:
    addresses = {GRPC: "127.0.0.1:0", HTTP: "127.0.0.1:0", **(listens or {})}
    return SupervisorConfig(processes=2, listens=addresses, ready_file=ready_file, command=command)


def run(config: SupervisorConfig, is_over: Callable[[list[str]], bool]) -> list[str]:
    """Run a supervisor until `is_over` is true of the events that it has logged, then stop it. Returns all events."""

    def said() -> list[str]:
        return [f"{line['name']} {line['what']}" for line in logs if line["event"] == "frontend process"]

    async def run() -> None:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(Supervisor(config).run(stopping))
            while not is_over(said()):
                await asyncio.sleep(POLL_S)
            stopping.set()

    with capture_logs() as logs:
        run_async(run())
    return said()


def test_supervisor_is_ready_with_the_shared_ports_once_all_processes_are(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"

    said = run(configured(running(SERVES), ready_file), lambda _: ready_file.exists())

    ready = json.loads(ready_file.read_text())
    assert ready.keys() == {"grpc", "http"}
    assert not any(address.endswith(":0") for address in ready.values())
    assert sorted(line.partition(" ready after")[0] for line in said) == ["frontend-1", "frontend-2"]
    assert all(f"grpc {ready['grpc']}, http {ready['http']}" in line for line in said)


def test_frontend_logs_its_stop_last() -> None:
    async def scenario() -> None:
        stopping = asyncio.Event()
        stopping.set()
        await Supervisor(configured(running(SERVES))).run(stopping)

    with capture_logs() as logs:
        run_async(scenario())

    assert logs[-1]["event"] == "frontend stopped"


def test_supervisor_is_not_ready_while_one_process_is_not(tmp_path: Path) -> None:
    ready_file = tmp_path / "ready"
    script = f"import sys, time; sys.argv[3] == 'frontend-1' and time.sleep(60); {SERVES}"
    was_ready: list[bool] = []

    def is_other_ready(said: list[str]) -> bool:
        was_ready.append(ready_file.exists())
        return bool(said)

    (said,) = [line for line in run(configured(running(script), ready_file), is_other_ready) if " ready " in line]

    assert said.startswith("frontend-2 ready")
    assert not any(was_ready)
    assert not ready_file.exists()


def test_supervisor_fails_with_the_name_of_a_process_that_cannot_start() -> None:
    script = f"import sys; sys.argv[3] == 'frontend-2' and sys.exit(3); {SERVES}"

    async def scenario() -> None:
        await Supervisor(configured(running(script))).run(asyncio.Event())

    said = "^frontend-2 exited with status 3 before it was ready; the reason is in the lines above$"
    with pytest.raises(StartupError, match=said):
        run_async(scenario())


@pytest.mark.parametrize(("option", "what"), [(GRPC, "gRPC"), (HTTP, "HTTP")])
def test_port_in_use_is_reported_before_any_process_is_started(option: str, what: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = configured(running("raise SystemExit(1)"), listens={option: address})
        with pytest.raises(StartupError, match=f"cannot listen for {what} on {address}: the port is in use.*{option}$"):
            run_async(Supervisor(config).run(asyncio.Event()))


def test_folder_path_too_long_for_sockets_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    with pytest.raises(StartupError, match="set TMPDIR to a shorter path"):
        run_async(Supervisor(configured(running(SERVES))).run(asyncio.Event()))


def test_configuration_does_not_show_the_command_line_which_may_hold_a_token() -> None:
    assert "command" not in repr(configured(running(SERVES)))
