"""`make up` does what the pages say: the stream at the head of README.md, the first requests, the end by Ctrl-C."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.commands.cluster import CONTENT, UP_S_MAX, Up, cluster, pieces
from tests.docs.pages import blocks, command
from tests.integration.harness.waiting import wait_until
from tests.registry.support import free_port

pytestmark = pytest.mark.model

HEAD = next(block for language, block in blocks() if language == "console")
NAME = "that-one"
ENDLESS = '"max_tokens": 2000, "ignore_eos": true'


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with cluster(tmp_path_factory.mktemp("up"), command("make up")) as one:
        yield one


def test_the_stream_at_the_head_goes_on_when_its_worker_is_killed(up: Up) -> None:
    words, here = command("curl -sN localhost"), {"localhost:8000": up.http}
    undisturbed = up.shell.run(words, here)
    (kill,) = re.findall(r"kill -9", HEAD)
    (position,) = re.findall(r"position=(\d+)", HEAD)

    with up.shell.running(words, here) as stream:
        wait_until(lambda: CONTENT in stream.output)
        pid = up.busy_pid()
        wait_until(lambda: stream.output.count(CONTENT) >= int(position), UP_S_MAX)
        up.shell.run(f"{kill} {pid}", {})
        assert stream.process.wait(UP_S_MAX) == 0

    # The words in README.md are not compared: another kind of processor may draw others.
    assert "".join(pieces(stream.output)) == "".join(pieces(undisturbed))
    wait_until(lambda: all(re.search(line, up.running.output, re.MULTILINE) for line in log_lines(HEAD)))


def log_lines(block: str) -> list[str]:
    """The log lines that a block shows, as expressions: they are shortened, and numbers, ids and places may differ."""
    lines = [line for line in block.splitlines() if re.match(r"[a-z]+-\d +\| ", line)]
    assert lines
    return ["^" + ".*".join(map(word_like, line.split())) for line in lines]


def word_like(word: str) -> str:
    """An expression for words that differ in numbers, or in a value that has figures in it."""
    return r"\S+".join(map(re.escape, re.split(r"(?<==)\S*\d\S*|\d[\d.]*", word)))


def test_a_chat_is_streamed(up: Up) -> None:
    printed = up.shell.run(command("Tell me about the sea."), {"127.0.0.1:8000": up.http})

    assert len(pieces(printed)) > 1


def test_a_prompt_is_completed(up: Up) -> None:
    printed = up.shell.run(command("The capital of France is"), {"127.0.0.1:8000": up.http})

    answer = json.loads(printed)
    assert "Paris" in answer["choices"][0]["text"]
    assert answer["usage"]["completion_tokens"] == 8


def test_the_terminal_chats(up: Up) -> None:
    variables = {"DYN_CHAT_URL": f"http://{up.http}", "DYN_CHAT_MAX_TOKENS": "8"}

    assert up.shell.run(command(".venv/bin/unbroken chat"), {}, text="Say hello.", **variables).strip()


def test_a_request_is_cancelled_by_its_name(up: Up) -> None:
    named = {"curl ": f"curl -H 'X-Request-Id: {NAME}' ", '"max_tokens": 64': ENDLESS, "127.0.0.1:8000": up.http}

    with up.shell.running(command("Tell me about the sea."), named) as stream:
        wait_until(lambda: CONTENT in stream.output)
        printed = up.shell.run(command("/cancel"), {"localhost:8000": up.http, "NAME": NAME})
        stream.process.wait(UP_S_MAX)

    assert json.loads(printed)["cancelled"] == 1
    assert '"CANCELLED"' in stream.output


def test_second_ctrl_c_ends_the_cluster_at_once(tmp_path: Path) -> None:
    """And the variable before `make` is the registry's port."""
    port = free_port()
    with cluster(tmp_path, command("DYN_UP_REGISTRY_PORT=50060 make up"), {"50060": str(port)}) as up:
        endless = {"127.0.0.1:8000": up.http, '"max_tokens": 64': ENDLESS}
        addresses = [up.http, *(one["address"] for one in (up.state["registry"], *up.state["workers"]))]
        with up.shell.running(command("Tell me about the sea."), endless) as stream:
            wait_until(lambda: CONTENT in stream.output)
            up.running.ctrl_c()
            wait_until(lambda: "[stopping: streams have 30 s to finish" in up.running.output)
            assert stream.process.poll() is None
            up.running.ctrl_c()
            up.running.process.wait(UP_S_MAX)
            stream.process.wait(UP_S_MAX)

    assert "exiting at once" in up.running.output
    assert f"127.0.0.1:{port}" in addresses
    assert "[DONE]" not in stream.output
    wait_until(lambda: all(map(is_refused, addresses)))


def is_refused(address: str) -> bool:
    """Check that nothing listens there."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), UP_S_MAX).close()
    except ConnectionRefusedError:
        return True
    return False
