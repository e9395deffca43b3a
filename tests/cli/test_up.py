"""`unbroken up`: starts a cluster, reports its addresses, restarts processes that exit, and leaves none behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import click
import pytest
from click.testing import CliRunner

from services.cli.up import command
from services.cli.worker import ENGINES
from tests.support.model_folder import make_model_folder

WAIT_S = 30.0
FAKES = Path(__file__).parents[1] / "fakes"
ANY_PORTS = ("--registry-port=0", "--grpc-port=0", "--http-port=0")


def until(condition: Callable[[], Any]) -> Any:
    """Wait until `condition` returns something true, and return that."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


class Up:
    """`unbroken up` as a process."""

    def __init__(self, folder: Path, log: Path, *options: str, import_path: str | None = None) -> None:
        self.state_file = folder / "cluster.json"
        self._log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services", "up", f"--state-dir={folder}", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=None if import_path is None else os.environ | {"PYTHONPATH": import_path},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def state(self) -> Any:
        """The content of cluster.json, or None if it does not exist."""
        return json.loads(self.state_file.read_text()) if self.state_file.exists() else None

    def wait_state(self) -> Any:
        """The content of cluster.json, once the cluster is up."""
        return until(lambda: self.process.poll() is None and self.state())

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)


def pids_in(state: Any) -> list[int]:
    return [entry["pid"] for entry in (state["registry"], *state["workers"], *state["frontends"])]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts clusters, and kills them after the test."""
    started: list[Up] = []

    def start_one(*options: str, **more: str) -> Up:
        started.append(Up(tmp_path / "run", tmp_path / f"{len(started)}.log", *ANY_PORTS, *options, **more))
        return started[-1]

    yield start_one
    for up in started:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()


def complete(http: str, model: str = "mocker") -> str:
    """The text of a short completion."""
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 4, "seed": 1, "temperature": 0}).encode()
    request = Request(f"http://{http}/v1/completions", body, {"content-type": "application/json"})
    with urlopen(request, timeout=WAIT_S) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def test_up_starts_a_cluster_restarts_its_processes_and_stops_it_in_order(start: Callable[..., Up]) -> None:
    up = start("--workers=2", "--frontends=2", "--", "--mocker-itl-ms=1")
    state = up.wait_state()
    pids = pids_in(state)
    text = complete(state["frontends"][0]["http"])

    assert all(map(is_alive, pids))
    assert state["registry"].keys() >= {"pid", "address"}
    assert [worker.keys() >= {"pid", "instance_id", "address"} for worker in state["workers"]] == [True, True]
    assert [frontend.keys() >= {"pid", "grpc", "http"} for frontend in state["frontends"]] == [True, True]
    assert text == complete(state["frontends"][1]["http"])

    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    later = until(lambda: (now := up.state()) and not set(pids_in(now)) & set(pids) and now)

    assert all(map(is_alive, pids_in(later)))
    assert later["registry"]["address"] == state["registry"]["address"]
    assert [entry["http"] for entry in later["frontends"]] == [entry["http"] for entry in state["frontends"]]
    assert until(lambda: try_complete(later["frontends"][1]["http"])) == text
    assert re.search(r"worker-2 +\| \[was killed by SIGKILL\]", up.log)

    assert up.end() == 0
    assert not any(map(is_alive, pids_in(later)))
    assert up.state() is None
    ends = re.findall(r"^(registry|worker|frontend)\S* +\| .* stopping ", up.log, re.MULTILINE)
    assert ends == ["frontend", "frontend", "worker", "worker", "registry"]
    assert re.search(rf"worker-2 +{state['workers'][1]['pid']} +address {state['workers'][1]['address']}", table_of(up))


def try_complete(http: str) -> str | None:
    """As `complete`, but returns None while the cluster cannot serve."""
    try:
        return complete(http)
    except OSError:
        return None


def table_of(up: Up) -> str:
    assert up.process.stdout is not None
    return up.process.stdout.read()


def test_up_supports_every_engine_of_a_worker(start: Callable[..., Up], tmp_path: Path) -> None:
    """Uses the fake TensorRT-LLM, which is on the import path of all workers, as a real one would be."""
    folder = make_model_folder(tmp_path / "model")
    path = os.pathsep.join(map(str, (FAKES, FAKES.parents[1])))
    up = start("--engine=trtllm", f"--model={folder}", "--", "--max-batch-size=3", import_path=path)
    state = up.wait_state()

    assert complete(state["frontends"][0]["http"], "model")
    assert set(ENGINES) == set(choices_of(command, "engine"))
    assert re.search(r"worker-1 +\| .*max_batch_size=3", up.log)
    assert up.end() == 0


def choices_of(of: click.Command, name: str) -> Sequence[str]:
    """The values that an option of a command accepts."""
    (kind,) = (param.type for param in of.params if param.name == name)
    assert isinstance(kind, click.Choice)
    return kind.choices


def test_printed_curl_command_is_valid(start: Callable[..., Up]) -> None:
    up = start("--workers=1")
    up.wait_state()
    up.end()
    line = table_of(up).partition("Try:\n")[2]

    assert line.startswith("  curl -N http://127.0.0.1:")
    assert json.loads(line.partition("-d '")[2].rpartition("'")[0])["model"] == "mocker"


def test_killed_supervisor_leaves_no_process_behind(start: Callable[..., Up]) -> None:
    up = start("--workers=1")
    pids = pids_in(up.wait_state())

    up.end(signal.SIGKILL)

    until(lambda: not any(map(is_alive, pids)))


def test_worker_is_not_restarted_with_no_restart(start: Callable[..., Up]) -> None:
    up = start("--workers=2", "--no-restart")
    first, second = up.wait_state()["workers"]

    os.kill(first["pid"], signal.SIGKILL)

    assert until(lambda: up.state()["workers"] == [second])
    assert up.end(signal.SIGINT) == 0


def streaming(http: str, tokens: int) -> HTTPResponse:
    """Start a stream and read its first line."""
    body = {"model": "mocker", "prompt": "Hi", "max_tokens": tokens, "seed": 1, "stream": True, "ignore_eos": True}
    request = Request(f"http://{http}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    response: HTTPResponse = urlopen(request, timeout=WAIT_S)
    response.readline()
    return response


def test_streams_continue_after_the_first_ctrl_c(start: Callable[..., Up]) -> None:
    up = start("--workers=1", "--", "--mocker-itl-ms=5", "--drain-timeout=41")
    frontend = up.wait_state()["frontends"][0]

    with streaming(frontend["http"], tokens=200) as response:
        up.process.send_signal(signal.SIGINT)
        assert response.read().endswith(b"data: [DONE]\n\n")

    assert up.process.wait(WAIT_S) == 0
    assert "[stopping: streams have 41 s" in up.log


def test_second_ctrl_c_ends_the_cluster_at_once(start: Callable[..., Up]) -> None:
    up = start("--workers=1")
    state = up.wait_state()

    with streaming(state["frontends"][0]["http"], tokens=100_000):
        up.process.send_signal(signal.SIGINT)
        until(lambda: "[stopping: streams have 30 s" in up.log)

        assert up.end(signal.SIGINT) == 130
        until(lambda: not any(map(is_alive, pids_in(state))))


def test_signal_during_the_start_stops_the_cluster(start: Callable[..., Up]) -> None:
    up = start("--workers=1", "--", "--mocker-startup-s=60")
    until(lambda: "frontend-1 | [ready" in up.log)

    assert up.end() == 0


@pytest.mark.parametrize("option", ["--registry-port", "--grpc-port", "--http-port"])
def test_port_in_use_is_an_error_before_any_process_starts(start: Callable[..., Up], option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = start(f"{option}={port}")

        assert up.process.wait(WAIT_S) == 1

    remedy = f"stop the program that uses it, or give another {option}"
    said = rf"error: cannot listen for .* on 127\.0\.0\.1:{port}: .*; {remedy}\n"
    assert re.fullmatch(said, up.log)


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--engine=llamacpp"], 2, "--engine llamacpp needs --model"),
        (["--engine=llamacpp", "--model=/no/such.gguf"], 1, "there is no file /no/such.gguf"),
        (["--engine=llamacpp", "--model=/etc/passwd"], 1, "/etc/passwd is not a GGUF file"),
        (["--engine=trtllm"], 2, "--engine trtllm needs --model"),
        (["--engine=trtllm", "--model=/no/such"], 1, "--engine trtllm needs TensorRT-LLM"),
        (["--", "--no-such-option"], 2, "--no-such-option"),
        (["--", "--mocker-itl-ms=soon"], 2, "--mocker-itl-ms"),
    ],
)
def test_invalid_worker_options_are_reported_once_before_any_process_starts(
    start: Callable[..., Up], options: list[str], status: int, said: str
) -> None:
    """A bug: registry, frontend and workers were started first, and each worker reported the error."""
    up = start(*options)

    assert up.process.wait(WAIT_S) == status
    assert up.log.count("Error: ") == 1
    assert said in up.log.partition("Error: ")[2]
    assert "registry" not in up.log


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("DYN_ADMIN_TOKEN", "two words", "visible ASCII"),
        ("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "nan", "active_decode_blocks_threshold"),
        ("DYN_ADMIN_LISTEN", "127.0.0.1:7777", "would be the admin address of every frontend"),
        ("DYN_ADMIN_GRPC_LISTEN", "127.0.0.1:7777", "would be the admin address of every frontend"),
    ],
)
def test_invalid_frontend_variables_are_reported_once_before_any_process_starts(
    variable: str, value: str, said: str
) -> None:
    done = CliRunner().invoke(command, ["--frontends=2"], env={variable: value})

    assert done.exit_code == 2
    assert said in done.output


def test_contradictory_admin_variables_are_reported_before_any_process_starts() -> None:
    variables = {"DYN_ADMIN_LISTEN": "127.0.0.1:0", "DYN_DISABLE_FRONTEND_ADMIN_API": "1"}

    done = CliRunner().invoke(command, [], env=variables)

    assert done.exit_code == 2
    assert "--disable-admin-api contradicts --admin-listen" in done.output


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--admission-control=none", "Frontends read it from DYN_ADMISSION_CONTROL."),
        ("--mocker-itl-ms=1", "Workers accept it after --."),
        (
            "--drain-timeout=1",
            "Frontends read it from DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS. Workers accept it after --.",
        ),
        (
            "--qqqqqq",
            "Options of workers go after --. Options of frontends are set by their DYN_ variables: see their --help.",
        ),
    ],
)
def test_option_of_another_process_is_refused_with_a_hint_where_to_set_it(option: str, said: str) -> None:
    done = CliRunner().invoke(command, [option])

    assert done.exit_code == 2
    assert option.partition("=")[0] in done.output
    assert done.output.endswith(f" {said}\n")


def test_option_that_up_sets_itself_gets_no_hint() -> None:
    """`up` passes it to its frontends, so the variable would have no effect."""
    assert "DYN_HTTP_LISTEN" not in CliRunner().invoke(command, ["--http-listen=127.0.0.1:1"]).output


def test_help_explains_how_to_set_options_of_workers_and_frontends() -> None:
    said = " ".join(CliRunner().invoke(command, ["--help"]).output.split())

    assert "Options after -- are passed to every worker" in said
    assert "Frontends read theirs from the DYN_ variables in `unbroken frontend --help`" in said


def test_state_folder_is_used_by_one_cluster_at_a_time(start: Callable[..., Up]) -> None:
    up = start("--workers=1")
    state = up.wait_state()
    second = start("--workers=1")

    assert second.process.wait(WAIT_S) == 1
    assert "another cluster runs in" in second.log
    assert up.state() == state
