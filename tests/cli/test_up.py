"""`unbroken up` checks all options before it starts a process, and says where options of other processes are set."""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from services.cli.up import command
from services.cli.worker import ENGINES
from tests.support.clock import WAIT_S
from tests.support.model_folder import make_model_folder
from tests.support.up import Up, complete, started_clusters, table_of, until

FAKES = Path(__file__).parents[1] / "fakes"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts clusters, which are killed after the test."""
    with started_clusters(tmp_path) as start_one:
        yield start_one


def test_up_supports_every_engine_of_a_worker(start: Callable[..., Up], tmp_path: Path) -> None:
    """Uses the fake TensorRT-LLM, which is on the import path of all workers, as a real one would be."""
    folder = make_model_folder(tmp_path / "model")
    path = os.pathsep.join(map(str, (FAKES, FAKES.parents[1])))
    up = start("--engine=trtllm", f"--model={folder}", "--", "--max-batch-size=3", import_path=path)
    state = up.wait_state()

    assert complete(state["frontends"][0]["http"], "model")
    assert set(ENGINES) == set(choices_of(command, "engine"))
    until(lambda: re.search(r"worker-1 +\| .*max_batch_size=3", up.log))
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
        ("DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", "nan", "--active-decode-blocks-threshold"),
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
