"""The commands for containers name what exists; the script for GPUs runs on the fake TensorRT-LLM."""

import re
from pathlib import Path

import pytest

from tests.docs.commands.shell import Shell
from tests.docs.pages import ROOT, command
from tests.gpu.smoke import QUESTIONS
from tests.integration.harness.plane.engines import FAKES
from tests.support.model_folder import make_model_folder

COMPOSE = (ROOT / "docker-compose.yml").read_text()
DOCKERFILE = "Dockerfile.trtllm"
UPS = (
    # A command for Compose, and the services that it names.
    ("docker compose up", ()),
    ("docker compose --profile llamacpp up", ()),
    ("docker compose --profile trtllm up", ()),
    ("docker compose up frontend trtllm-1", ("frontend", "trtllm-1")),
)


@pytest.mark.parametrize(("part", "services"), UPS)
def test_compose_has_the_profile_and_the_services_and_reads_the_variables(part: str, services: tuple[str, ...]) -> None:
    words = command(part)

    assert words.endswith(" ".join(("up", *services)))
    for service in services:
        assert f"\n  {service}:\n" in COMPOSE
    for profile in re.findall(r"--profile (\w+)", words):
        assert f"profiles: [{profile}]" in COMPOSE
    for variable in re.findall(r"(\w+)=", words):
        assert f"${{{variable}:-" in COMPOSE


def test_the_image_for_gpus_is_built_from_the_file_and_is_the_one_of_compose() -> None:
    words = command("docker build -f").split()

    assert words == ["docker", "build", "-f", DOCKERFILE, "-t", "unbroken-trtllm", "."]
    assert (ROOT / DOCKERFILE).exists()
    assert "  image: unbroken-trtllm\n" in COMPOSE
    assert f"    build: {{ context: ., dockerfile: {DOCKERFILE} }}\n" in COMPOSE


def test_the_script_for_gpus_asks_all_it_has_to_ask(tmp_path: Path) -> None:
    options, image, words = re.split(r"(nvcr\.io/\S+) ", command("/gpu/smoke.py").replace("\\\n", ""))
    shell = Shell(tmp_path, PYTHONPATH=str(FAKES))
    (mounted,) = re.findall(r"\$PWD/(\S+):/gpu:ro", options)

    printed = shell.run(f"{words} --patience 60", {"/gpu": mounted, "/model": str(make_model_folder(tmp_path))})

    assert f"FROM {image}\n" in (ROOT / DOCKERFILE).read_text()
    assert [question for question, _, _ in QUESTIONS if f"| {question} | " not in printed] == []
