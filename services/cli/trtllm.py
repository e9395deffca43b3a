"""The options of `unbroken worker --engine trtllm`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from services.cli.options import env_option
from services.runtime.log import log_config
from services.runtime.process import StartupError
from services.worker.engine import Engine

if TYPE_CHECKING:
    from services.worker.engines.trtllm import TrtLlmConfig

Function = TypeVar("Function", bound=Callable[..., Any])
GUIDED_BACKENDS = ("xgrammar", "llguidance")

_OPTIONS = (
    env_option(
        "--tensor-parallel-size",
        "DYN_TENSOR_PARALLEL_SIZE",
        type=click.IntRange(1),
        default=1,
        help="For trtllm: GPUs that share each layer of the model.",
    ),
    env_option(
        "--max-batch-size",
        "DYN_MAX_BATCH_SIZE",
        type=click.IntRange(1),
        default=64,
        help="For trtllm: how many requests run at a time. What comes beyond waits in the worker's queue.",
    ),
    env_option(
        "--max-num-tokens",
        "DYN_MAX_NUM_TOKENS",
        type=click.IntRange(1),
        default=8192,
        help="For trtllm: tokens that a step computes at most. Longer prompts are computed in several.",
    ),
    env_option(
        "--max-seq-len",
        "DYN_MAX_SEQ_LEN",
        type=click.IntRange(2),
        help="For trtllm: tokens of prompt and answer together. Default: --context-length, or what the model was made"
        " for, 8192 at most.",
    ),
    env_option(
        "--kv-cache-free-gpu-memory-fraction",
        "DYN_KV_CACHE_FREE_GPU_MEMORY_FRACTION",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.9,
        help="For trtllm: how much of the memory that the model leaves free becomes key-value cache.",
    ),
    env_option(
        "--guided-decoding-backend",
        "DYN_GUIDED_DECODING_BACKEND",
        type=click.Choice(GUIDED_BACKENDS),
        help="For trtllm: what holds answers to a form. Default: guided requests are refused.",
    ),
    env_option(
        "--extra-llm-api-options",
        "DYN_EXTRA_LLM_API_OPTIONS",
        type=click.Path(path_type=Path),
        help="For trtllm: a YAML file of further arguments of tensorrt_llm.LLM. What has a flag is given by its flag.",
    ),
)


def trtllm_options(function: Function) -> Function:
    """All of them, in this order."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_trtllm(given: dict[str, Any]) -> None:
    """What can be told without loading TensorRT-LLM: options, whether it is there, the model's folder.

    Raises ClickException.
    """
    from services.worker.engines.trtllm import TrtLlmEngine

    if given["model"] is None:
        raise click.UsageError("--engine trtllm needs --model: a folder with a model of Hugging Face")
    try:
        TrtLlmEngine(trtllm_config(given))
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def trtllm_engine(given: dict[str, Any]) -> Engine:
    """Raises StartupError."""
    from services.worker.engines.trtllm import TrtLlmEngine

    config = trtllm_config(given)
    log_config(config)
    return TrtLlmEngine(config)


def trtllm_config(given: dict[str, Any]) -> "TrtLlmConfig":
    """Raises StartupError."""
    from services.worker.engines.trtllm import TrtLlmConfig
    from services.worker.engines.trtllm.options import read_extra

    model = Path(given["model"])
    file = given["extra_llm_api_options"]
    return TrtLlmConfig(
        model=model,
        served_model_name=given["served_model_name"] or model.resolve().name,
        tensor_parallel_size=given["tensor_parallel_size"],
        max_batch_size=given["max_batch_size"],
        max_num_tokens=given["max_num_tokens"],
        max_seq_len=given["max_seq_len"] or given["context_length"],
        kv_cache_free_gpu_memory_fraction=given["kv_cache_free_gpu_memory_fraction"],
        guided_decoding_backend=given["guided_decoding_backend"],
        extra={} if file is None else read_extra(file),
    )
