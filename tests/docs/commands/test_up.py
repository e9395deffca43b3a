"""`unbroken up`, in each way that the pages name, starts what they say and serves."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.docs.commands.cluster import Up, cluster
from tests.docs.commands.shell import Shell
from tests.docs.pages import ROOT, command, spans
from tests.integration.harness.plane.engines import FAKES
from tests.integration.harness.waiting import wait_until
from tests.support.model_folder import make_model_folder


@dataclass(frozen=True)
class Way:
    """workers: how many. model: what it serves. logged: an expression for a line of its log."""

    words: str
    logged: str
    workers: int = 2
    model: str = "mocker"
    variables: Mapping[str, str] = field(default_factory=dict)


WAYS = (
    Way("DYN_PROCESSES=2 unbroken up", r"^frontend-1 .* processes=2\b"),
    Way("DYN_STALL_MS=3000 unbroken up", r"^frontend-1 .*\bstall_s=3\.0\b"),
    Way(
        "unbroken up --engine trtllm --model /model --workers 1",
        r"^worker-1 .* worker ready .* engine=trtllm ",
        workers=1,
        model="model",
        variables={"PYTHONPATH": f"{FAKES}:{ROOT}"},
    ),
)


def ask(up: Up, model: str) -> None:
    """The completion of docs/clients.md, with this model."""
    here = {"127.0.0.1:8000": up.http, "smollm2": model}
    answer = json.loads(up.shell.run(command("The capital of France is"), here))
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.words)
def test_a_cluster_is_what_the_command_says(way: Way, tmp_path: Path) -> None:
    """TensorRT-LLM as the fake plays it."""
    words = command(way.words)
    here = {"/model": str(make_model_folder(tmp_path / "model"))} if "/model" in words else {}

    with cluster(tmp_path, words, here, **way.variables) as up:
        ask(up, way.model)

        assert len(up.state["workers"]) == way.workers
        wait_until(lambda: re.search(way.logged, up.running.output, re.MULTILINE))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with cluster(tmp_path_factory.mktemp("up"), command(".venv/bin/unbroken up --engine mocker")) as one:
        yield one


def test_a_cluster_without_a_model_serves_the_mocker(up: Up) -> None:
    ask(up, "mocker")


def test_busy_thresholds_are_read_and_set(up: Up) -> None:
    reading, setting = command("curl localhost:8000/busy_threshold"), command("curl localhost:8000/busy_threshold -d")
    here = {"localhost:8000": up.http}

    put = json.loads(up.shell.run(setting, here | {"smollm2": "mocker"}))
    got = json.loads(up.shell.run(reading, here))

    assert put["active_decode_blocks_threshold"] == 0.9
    assert put["admission_control"] == "none"
    assert [one["active_decode_blocks_threshold"] for one in got["thresholds"] if one["model"] == "mocker"] == [0.9]


def test_client_comes_back_to_an_answer(up: Up, tmp_path: Path) -> None:
    part = tmp_path / "part"
    plane, file = {"127.0.0.1:8000": up.http}, {"/tmp/part": str(part)}
    asking, model = command("x-on-disconnect: continue"), {"smollm2": "mocker"}

    up.shell.run(asking, plane | model | file)
    rest = up.shell.run(command("/v1/streams/"), plane | file)
    whole = up.shell.run(asking.partition(" | ")[0], plane | model)

    assert rest.endswith("data: [DONE]\n\n")
    assert contents(part.read_text()) + contents(rest) == contents(whole)


def contents(events: str) -> str:
    """The text in events with ids."""
    data = [json.loads(line) for line in re.findall(r"^data: (\{.*)", events, re.MULTILINE)]
    return "".join(one["choices"][0]["delta"].get("content", "") for one in data)


def test_each_path_that_the_pages_name_is_served(up: Up) -> None:
    paths = {span for span in spans() if re.fullmatch(r"/\w+(\.json)?", span)} - {"/tmp", "/no_think"}

    assert "/live" in paths
    for path in paths:
        assert up.shell.run(f"curl --fail --silent {up.http}{path}", {})


def test_a_cluster_serves_clients_over_tls(tmp_path: Path) -> None:
    folder = f"{tmp_path}/certs"
    Shell(tmp_path).run(command("unbroken certs certs"), {"certs certs": f"certs {folder}"})

    with cluster(tmp_path, command("DYN_TLS_CERT_PATH=certs/edge.pem"), {"certs/": f"{folder}/"}) as up:
        here = {"localhost:8000": up.http, "certs/": f"{folder}/"}
        health = up.shell.run(command("curl --cacert certs/ca.pem"), here)
        answer = up.shell.run(command("unbroken chat --url https"), here, "Hello!")

        assert json.loads(health)["status"] == "ready"
        assert answer.strip()
        assert f"curl -N https://{up.http}/" in up.running.output


def test_a_cluster_speaks_tls_among_its_processes(tmp_path: Path) -> None:
    folder = f"{tmp_path}/certs"
    Shell(tmp_path).run(command("unbroken certs certs"), {"certs certs": f"certs {folder}"})

    with cluster(tmp_path, command("unbroken up --certs certs"), {"--certs certs": f"--certs {folder}"}) as up:
        here = {"localhost:8000": up.http, "certs/": f"{folder}/"}
        answer = up.shell.run(command("unbroken chat --url https"), here, "Hello!")

        assert answer.strip()
        assert up.running.output.count(f"{folder}/worker.pem") == len(up.state["workers"])
