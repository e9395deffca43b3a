"""trtllm options: they reach the engine, and a configuration that cannot work is refused before the worker starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.cli.engines.trtllm import trtllm_config
from services.cli.worker import command
from services.worker.engines.trtllm import TrtLlmConfig
from tests.support.clock import WAIT_S


def test_missing_tensorrt_llm_is_an_error_that_says_how_to_install_it(tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "services", "worker", "--engine=trtllm", f"--model={tmp_path}"]
    done = subprocess.run(command_line, capture_output=True, text=True, timeout=WAIT_S, check=False)

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
def test_invalid_trtllm_options_are_refused(options: list[str], said: str) -> None:
    done = CliRunner().invoke(command, ["--engine=trtllm", *options])

    assert done.exit_code in (1, 2)
    assert said in done.output


def test_trtllm_options_reach_the_engine(tmp_path: Path) -> None:
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


def test_context_length_sets_the_engines_maximum_sequence_length(tmp_path: Path) -> None:
    options = ["--engine=trtllm", f"--model={tmp_path}", "--context-length=300", "--served-model-name=x"]

    config = trtllm_config(command.make_context("worker", options).params)

    assert (config.max_seq_len, config.served_model_name) == (300, "x")
