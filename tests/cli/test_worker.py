"""`unbroken worker`: what cannot work is refused before anything is started."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.trtllm import trtllm_config
from services.cli.worker import FAULTS, check_options, command
from services.worker.engines.mocker import Faults
from services.worker.engines.trtllm import TrtLlmConfig


@pytest.mark.parametrize(
    "options", [["--listen=0.0.0.0:0"], ["--listen=[::]:7000"], ["--listen=0.0.0.0:0", "--advertise=0.0.0.0:7000"]]
)
def test_an_address_that_nobody_can_reach_is_refused(options: list[str]) -> None:
    """Frontends on other machines would have called themselves."""
    done = CliRunner().invoke(command, options)

    assert done.exit_code == 2
    assert f"{options[-1].replace('=', ' ')} is no address that frontends can reach" in done.output
    assert "--advertise host:port" in done.output


def test_sessions_on_another_host_than_the_one_that_would_be_advertised_are_refused() -> None:
    """Frontends were sent to a port where nothing listened."""
    done = CliRunner().invoke(command, ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001"])

    assert done.exit_code == 2
    assert "would look for --session-listen 127.0.0.16:7001 on the host of --listen 127.0.0.15:7000" in done.output


@pytest.mark.parametrize(
    "options",
    [
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.15:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=0.0.0.0:7001"],
        ["--listen=127.0.0.15:7000", "--session-listen=127.0.0.16:7001", "--advertise=10.0.0.2:7000"],
    ],
)
def test_sessions_where_frontends_may_find_them_are_not(options: list[str]) -> None:
    check_options(command.make_context("worker", options).params)


def test_muting_a_rank_that_there_is_not_is_refused() -> None:
    """It would have muted nothing, in silence."""
    done = CliRunner().invoke(command, ["--mocker-dp-ranks=2", "--mocker-fault=mute_rank=2"])

    assert done.exit_code == 2
    assert "mute_rank=2: --mocker-dp-ranks gives no such rank" in done.output


def test_trtllm_without_its_package_says_in_a_sentence_how_to_get_it(tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "services", "worker", "--engine=trtllm", f"--model={tmp_path}"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=20, check=False)

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("Error: --engine trtllm needs TensorRT-LLM")
    assert "nvcr.io/nvidia/tensorrt-llm/release:1.2.1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "needs --model"),
        (["--model=m", "--extra-llm-api-options=/none"], "/none cannot be read"),
        (["--model=m", "--max-batch-size=0"], "--max-batch-size"),
        (["--model=m", "--guided-decoding-backend=other"], "--guided-decoding-backend"),
    ],
)
def test_options_of_trtllm_that_cannot_work_are_refused_before_anything_is_started(
    options: list[str], said: str
) -> None:
    done = CliRunner().invoke(command, ["--engine=trtllm", *options])

    assert done.exit_code in (1, 2)
    assert said in done.output


def test_options_of_trtllm_reach_its_engine(tmp_path: Path) -> None:
    (tmp_path / "extra.json").write_text('{"enable_attention_dp": true}')
    options = [
        "--engine=trtllm",
        f"--model={tmp_path}",
        "--tensor-parallel-size=2",
        "--max-batch-size=8",
        "--max-num-tokens=100",
        "--max-seq-len=200",
        "--kv-cache-free-gpu-memory-fraction=0.5",
        "--guided-decoding-backend=xgrammar",
        f"--extra-llm-api-options={tmp_path / 'extra.json'}",
    ]

    config = trtllm_config(command.make_context("worker", options).params)

    assert config == TrtLlmConfig(
        model=tmp_path,
        served_model_name=tmp_path.name,
        tensor_parallel_size=2,
        max_batch_size=8,
        max_num_tokens=100,
        max_seq_len=200,
        kv_cache_free_gpu_memory_fraction=0.5,
        guided_decoding_backend="xgrammar",
        extra={"enable_attention_dp": True},
    )


def test_the_length_of_a_context_has_one_meaning_for_all_engines(tmp_path: Path) -> None:
    options = ["--engine=trtllm", f"--model={tmp_path}", "--context-length=300", "--served-model-name=x"]

    config = trtllm_config(command.make_context("worker", options).params)

    assert (config.max_seq_len, config.served_model_name) == (300, "x")


def test_help_tells_every_fault_that_the_mocker_knows() -> None:
    shown = CliRunner().invoke(command, ["--help"], terminal_width=10_000).output

    assert set(FAULTS) == {field.name for field in fields(Faults)}
    assert all(f"{name}={meaning}" in shown for name, meaning in FAULTS.items())
