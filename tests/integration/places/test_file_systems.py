"""Where files cannot be written, each command works from memory, or ends with one sentence that says what to do.

| workload | nemesis | checker |
| --- | --- | --- |
| a plane with the mocker and with a real model | every file system is read-only | requests are answered |
| several processes | the same; only /dev/shm, only /tmp is writable | one sentence; they serve |
| a local cluster, `models pull` | no home, read-only | one sentence, or the folder that was given is used |
| any | no /proc, no /dev/shm, no user entry, no IPv6, a ready file that cannot be written | works, or one sentence |
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from services.models.download import resolve
from tests.integration.harness.plane.commands import BARE, Commands, commands, complete, wait_served
from tests.integration.harness.waiting import wait_until
from tests.integration.places.conftest import (
    NO_IPV6,
    NO_PROC,
    NO_SHARED_MEMORY,
    NO_USER,
    READ_ONLY,
    SHARED_MEMORY_ONLY,
    TMP_ONLY,
    Place,
)

pytestmark = pytest.mark.netns
PORTS = ("--registry-port=0", "--grpc-port=0", "--http-port=0")
LISTEN = ("--grpc-listen=127.0.0.1:0", "--http-listen=127.0.0.1:0")


def serve(plane: Commands, *options: str) -> str:
    """Start a plane with the mocker, and return an answer."""
    registry = plane.registry()
    plane.worker(registry, "--metrics-port=0")
    return wait_served(plane.frontend(registry, *options).wait_event("frontend ready")["http"])


def wait_up(plane: Commands, *options: str) -> str:
    """Start a local cluster, and return the address of its frontend."""
    up = plane.start("up", "--workers=1", *PORTS, *options)
    wait_until(lambda: "curl -N http://" in up.log or up.process.poll() is not None, 60)
    assert "curl -N http://" in up.log, up.log
    return up.log.partition("curl -N http://")[2].partition("/")[0]


@pytest.mark.parametrize("place", [READ_ONLY, NO_PROC, NO_SHARED_MEMORY, NO_USER])
def test_plane_serves(tmp_path: Path, place: Place) -> None:
    with commands(tmp_path, place.variables, place.prefix) as plane:
        assert json.loads(serve(plane))["choices"]


@pytest.mark.model
def test_plane_with_a_real_model_serves_from_a_read_only_root(tmp_path: Path) -> None:
    """A bug: the frontend was up and refused every request, because it could not write the tokeniser."""
    with commands(tmp_path, BARE, READ_ONLY.prefix) as plane:
        registry = plane.registry()
        plane.worker(registry, "--engine=llamacpp", f"--model={resolve('smollm2')}")
        address = plane.frontend(registry).wait_event("frontend ready")["http"]

        assert json.loads(wait_served(address, lambda at: complete(at, "smollm2")))["choices"]


@pytest.mark.parametrize("place", [SHARED_MEMORY_ONLY, TMP_ONLY, NO_PROC, NO_USER])
def test_several_processes_serve(tmp_path: Path, place: Place) -> None:
    with commands(tmp_path, place.variables, place.prefix) as plane:
        assert json.loads(serve(plane, "--processes=2"))["choices"]


def test_several_processes_end_in_one_sentence_where_no_folder_can_be_written(tmp_path: Path) -> None:
    with commands(tmp_path, BARE, READ_ONLY.prefix) as plane:
        done = plane.run("frontend", "--processes=2", "--log-level=error", *LISTEN)

    assert done.returncode == 1
    assert done.stderr == (
        "error: no folder for the sockets of several processes can be written: mount a writable one at /tmp, or name"
        " one in the variable TMPDIR\n"
    )


def test_local_cluster_ends_in_one_sentence_where_its_state_cannot_be_written(tmp_path: Path) -> None:
    with commands(tmp_path, {**BARE, "HOME": "/none"}, READ_ONLY.prefix) as plane:
        done = plane.run("up", *PORTS, "--log-level=error")

    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot use the state folder /none/.cache/unbroken/run: Read-only file system; give one that can be"
        " written with --state-dir\n"
    )


@pytest.mark.parametrize("place", [TMP_ONLY, NO_USER, NO_PROC])
def test_local_cluster_uses_the_folder_that_is_given(tmp_path: Path, place: Place) -> None:
    with TemporaryDirectory(dir="/tmp") as folder, commands(tmp_path, place.variables, place.prefix) as plane:
        assert complete(wait_up(plane, f"--state-dir={folder}/run"))[0] == 200


def test_user_without_an_entry_is_told_to_name_a_folder(tmp_path: Path) -> None:
    with commands(tmp_path, BARE, NO_USER.prefix) as plane:
        up = plane.run("up", *PORTS)
        pull = plane.run("models", "pull", "smollm2")
        worker = plane.run("worker", "--engine=llamacpp", "--model=smollm2")
        helped = plane.run("up", "--help")

    why = "user 0 has no home folder: set XDG_CACHE_HOME (or HOME) to a folder that it may write to"
    assert (up.returncode, up.stderr.splitlines()[-1]) == (2, f"Error: {why}, or give --state-dir")
    assert (pull.returncode, pull.stderr) == (1, f"Error: {why}\n")
    assert (worker.returncode, worker.stderr) == (1, f"Error: {why}\n")
    assert helped.returncode == 0


def test_random_user_id_serves(tmp_path: Path) -> None:
    """As in OpenShift. The capability stands for an installation that everybody can read."""
    may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    user = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", *may_read)
    with commands(tmp_path, {**BARE, "HOME": "/"}, user) as plane:
        assert json.loads(serve(plane, "--processes=2"))["choices"]
        up = plane.run("up", *PORTS, "--log-level=error")

    assert (up.returncode, up.stderr.count("\n")) == (1, 1)
    assert up.stderr.startswith("error: cannot use the state folder /.cache/unbroken/run: Permission denied")


def test_pull_ends_in_one_sentence_where_the_cache_cannot_be_written(tmp_path: Path) -> None:
    with commands(tmp_path, {**BARE, "XDG_CACHE_HOME": "/none"}, READ_ONLY.prefix) as plane:
        done = plane.run("models", "pull", "smollm2")

    assert done.returncode == 1
    assert done.stderr == (
        "Error: cannot store smollm2 in /none/unbroken/models: Read-only file system; name a folder that can be written"
        " in XDG_CACHE_HOME\n"
    )


@pytest.mark.parametrize("command", ["registry", "worker", "frontend", "frontend --processes=2"])
def test_ready_file_that_cannot_be_written_ends_a_command_in_one_sentence(tmp_path: Path, command: str) -> None:
    listen = LISTEN if command.startswith("frontend") else ("--listen=127.0.0.1:0",)
    with commands(tmp_path) as plane:
        done = plane.run(*command.split(), *listen, "--ready-file=/none/ready", "--log-level=error")

    assert done.returncode == 1
    assert done.stderr == (
        "error: cannot write the ready file /none/ready: No such file or directory; give another --ready-file\n"
    )


def test_plane_serves_without_ipv6(tmp_path: Path) -> None:
    with commands(tmp_path, BARE, NO_IPV6.prefix) as plane:
        plane.registry("--listen=[::]:0")
        plane.frontend("127.0.0.1:1")
        done = plane.run("frontend", LISTEN[0], "--http-listen=[::1]:0", "--log-level=error")

    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot listen for HTTP on [::1]:0: ")
    assert done.stderr.count("\n") == 1
