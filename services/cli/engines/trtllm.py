"""Options of `unbroken worker --engine trtllm`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from services.cli.options import Integer, Number, combined, env_option
from services.runtime.log import log_config
from services.runtime.process import StartupError
from services.worker.engine import Engine

if TYPE_CHECKING:
    from services.worker.engines.trtllm import TrtLlmConfig

GUIDED_BACKENDS = ("xgrammar", "llguidance")

trtllm_options = combined(
    env_option(
        "--tensor-parallel-size",
        "DYN_TENSOR_PARALLEL_SIZE",
        type=Integer(1, 1024),
        default=1,
        help="For trtllm: GPUs that share each layer of the model.",
    ),
    env_option(
        "--max-batch-size",
        "DYN_MAX_BATCH_SIZE",
        type=Integer(1),
        default=64,
        help="For trtllm: number of requests that run at the same time. Further requests wait in the worker's queue.",
    ),
    env_option(
        "--max-num-tokens",
        "DYN_MAX_NUM_TOKENS",
        type=Integer(1),
        default=8192,
        help="For trtllm: maximum number of tokens in one step. Longer prompts are computed in several steps.",
    ),
    env_option(
        "--max-seq-len",
        "DYN_MAX_SEQ_LEN",
        type=Integer(2),
        help="For trtllm: maximum length of prompt and answer together, in tokens. Default: --context-length, or the"
        " model's own limit, at most 8192.",
    ),
    env_option(
        "--kv-cache-free-gpu-memory-fraction",
        "DYN_KV_CACHE_FREE_GPU_MEMORY_FRACTION",
        type=Number(0, 1, above=True),
        default=0.9,
        help="For trtllm: fraction of the GPU memory left free by the model that is used for the key-value cache.",
    ),
    env_option(
        "--guided-decoding-backend",
        "DYN_GUIDED_DECODING_BACKEND",
        type=click.Choice(GUIDED_BACKENDS),
        help="For trtllm: backend of guided decoding. Default: guided requests are refused.",
    ),
    env_option(
        "--extra-llm-api-options",
        "DYN_EXTRA_LLM_API_OPTIONS",
        type=click.Path(path_type=Path),
        help="For trtllm: YAML file with further arguments of tensorrt_llm.LLM. Arguments that have an option of their"
        " own must be set by it.",
    ),
)


def check_trtllm(given: dict[str, Any]) -> None:
    """Check what needs no loaded model: the options, whether TensorRT-LLM is installed, and the model's folder.

    Raises ClickException.
    """
    from services.worker.engines.trtllm import TrtLlmEngine

    if given["model"] is None:
        raise click.UsageError("--engine trtllm needs --model: a folder with a Hugging Face model")
    try:
        TrtLlmEngine(trtllm_config(given))
    except StartupError as error:
        raise click.ClickException(str(error)) from error


def trtllm_engine(given: dict[str, Any]) -> Engine:
    """Create the engine. Raises StartupError."""
    from services.worker.engines.trtllm import TrtLlmEngine

    config = trtllm_config(given)
    log_config(config)
    return TrtLlmEngine(config)


def trtllm_config(given: dict[str, Any]) -> "TrtLlmConfig":
    """The engine's configuration. Raises StartupError if the YAML file cannot be used."""
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
