"""A cluster starts, restarts processes that exit, stops in order, and leaves no process behind."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from services.access.keys_edit import add_key
from tests.support.clock import WAIT_S
from tests.support.up import Up, complete, started_clusters, table_of, until


def is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not count."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def pids_in(state: Any) -> list[int]:
    return [entry["pid"] for entry in (state["registry"], *state["workers"], *state["frontends"])]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Starts clusters, which are killed after the test."""
    with started_clusters(tmp_path) as start_one:
        yield start_one


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
    until(lambda: re.search(r"worker-2 +\| \[was killed by SIGKILL\]", up.log))

    assert up.end() == 0
    assert not any(map(is_alive, pids_in(later)))
    assert up.state() is None
    ends = re.findall(r"^(registry|worker|frontend)\S* +\| .* stopping ", up.log, re.MULTILINE)
    assert ends == ["frontend", "frontend", "worker", "worker", "registry"]
    assert re.search(rf"worker-2 +{state['workers'][1]['pid']} +address {state['workers'][1]['address']}", table_of(up))


def test_up_with_a_keys_file_says_how_to_send_a_key(
    start: Callable[..., Up], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug: it ended with a KeyError, because its frontends showed it no models."""
    add_key(tmp_path / "keys.toml", "acme")
    monkeypatch.setenv("DYN_KEYS_FILE", str(tmp_path / "keys.toml"))

    up = start("--workers=1")
    up.wait_state()
    until(lambda: up.process.poll() is not None or "Ctrl-C stops it" in up.log)

    assert up.end() == 0, up.log
    assert '/v1/chat/completions -H "authorization: Bearer $KEY"' in table_of(up)


def try_complete(http: str) -> str | None:
    """As `complete`, but returns None while the cluster cannot serve."""
    try:
        return complete(http)
    except OSError:
        return None


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
    up = start("--workers=1", "--", "--mocker-startup-s=600")
    until(lambda: "frontend-1 | [ready" in up.log)

    assert up.end() == 0


def test_state_folder_is_used_by_one_cluster_at_a_time(start: Callable[..., Up]) -> None:
    up = start("--workers=1")
    state = up.wait_state()
    second = start("--workers=1")

    assert second.process.wait(WAIT_S) == 1
    assert "another cluster runs in" in second.log
    assert up.state() == state
