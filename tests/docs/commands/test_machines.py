"""The commands for several machines make one plane. Here all run on one machine, at its own addresses.

The container for GPUs is replaced: the command behind its image runs beside the others, on the fake TensorRT-LLM.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from services.models.download import SMOLLM2
from tests.docs.commands.cluster import PATIENT, UP_S_MAX
from tests.docs.commands.shell import Running, Shell
from tests.docs.pages import ROOT, command
from tests.integration.harness.plane.engines import FAKES
from tests.integration.harness.waiting import wait_until
from tests.registry.support import Etcd, free_port
from tests.support.model_folder import make_model_folder

pytestmark = [pytest.mark.etcd, pytest.mark.model]

REGISTRY = "10.0.0.1:50050"
IMAGE = "unbroken-trtllm "


def address() -> str:
    return f"127.0.0.1:{free_port()}"


@dataclass
class Machines:
    """What runs on them, by its kind."""

    shell: Shell
    registry: str
    http: str = field(default_factory=address)
    running: dict[str, Running] = field(default_factory=dict)

    def instance(self, worker: str) -> str:
        """The id in a worker's log, once it is ready."""

        def look() -> re.Match[str] | None:
            assert self.running[worker].process.poll() is None, self.running[worker].output
            return re.search(r"worker ready .*instance=(\w+)", self.running[worker].output)

        return str(wait_until(look, UP_S_MAX)[1])

    def wait_found(self, frontend: Running, *processes: str) -> None:
        """Return once each of these processes of it has found both workers."""
        lines = [
            f"worker found .*instance={self.instance(worker)} process={process}$"
            for worker in ("llamacpp", "trtllm")
            for process in processes
        ]
        wait_until(lambda: all(re.search(line, frontend.output, re.MULTILINE) for line in lines), UP_S_MAX)

    def complete(self, model: str, http: str | None = None) -> int:
        """How many tokens the completion of docs/clients.md brings."""
        words = command("The capital of France is")
        answer = self.shell.run(words, {"127.0.0.1:8000": http or self.http, "smollm2": model})
        return int(json.loads(answer)["usage"]["completion_tokens"])


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A registry over etcd, a worker with each engine, a frontend that has found both."""
    folder = tmp_path_factory.mktemp("machines")
    model_folder = make_model_folder(folder / "llama")
    etcd = Etcd(folder)
    etcd.start()
    etcd.wait_listening()
    one = Machines(Shell(folder, **PATIENT), address())
    registry = {REGISTRY: one.registry}
    with ExitStack() as ends:
        ends.callback(etcd.kill)

        def start(kind: str, words: str, places: dict[str, str], **variables: str) -> None:
            one.running[kind] = ends.enter_context(one.shell.running(words, places, **variables))

        start("registry", command("unbroken registry --listen"), registry | {"10.0.0.1:2379": etcd.endpoint})
        start(
            "llamacpp",
            command("unbroken worker --listen"),
            registry
            | {"10.0.0.2:7000": address(), "10.0.0.2:7001": address(), "/models/model.gguf": str(SMOLLM2.path)},
        )
        start(
            "trtllm",
            f"unbroken {command('docker run --rm --gpus all --network host').partition(IMAGE)[2]}",
            registry | {"10.0.0.2:7000": address(), "--model /model": f"--model {model_folder}"},
            PYTHONPATH=f"{FAKES}:{ROOT}",
        )
        start(
            "frontend",
            command("unbroken frontend --http-listen"),
            registry | {"0.0.0.0:8000": one.http, "0.0.0.0:50051": address()},
        )
        one.wait_found(one.running["frontend"], "frontend")
        yield one


def test_each_engine_answers(machines: Machines) -> None:
    assert machines.complete("smollm2") == 8
    assert machines.complete("llama") == 8


def test_a_frontend_of_four_processes_joins_them(machines: Machines) -> None:
    http = address()
    variables = {"DYN_REGISTRY": machines.registry, "DYN_HTTP_LISTEN": http, "DYN_GRPC_LISTEN": address()}
    with machines.shell.running(command("unbroken frontend --processes 4"), {}, **variables) as frontend:
        machines.wait_found(frontend, *(f"frontend-{number}" for number in range(1, 5)))

        assert machines.complete("llama", http) == 8


def test_a_worker_is_drained_by_the_id_in_its_log(machines: Machines) -> None:
    """The last of the tests, because the worker ends."""
    here = {"INSTANCE": machines.instance("trtllm"), REGISTRY: machines.registry}

    machines.shell.run(command("unbroken drain INSTANCE"), here)

    assert machines.running["trtllm"].process.wait(UP_S_MAX) == 0
