"""What the worker tells TensorRT-LLM at its start: flags, and a file for everything that has no flag.

All that a request rests on is passed explicitly. Where the engine would settle it by itself it does so in another
process, and we would never know: see `max_seq_len`.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.process import StartupError

BLOCK_TOKENS_DEFAULT = 32
"""Tokens that a block of the key-value cache holds, unless the file says otherwise."""
_FLAGS = {
    "model": "--model",
    "tokenizer": "--model",
    "tensor_parallel_size": "--tensor-parallel-size",
    "max_batch_size": "--max-batch-size",
    "max_num_tokens": "--max-num-tokens",
    "max_seq_len": "--max-seq-len",
    "guided_decoding_backend": "--guided-decoding-backend",
}
_FRACTION = "free_gpu_memory_fraction"
_OURS = {
    "skip_tokenizer_init": "the worker decides it: guided decoding needs the engine's tokeniser",
    "enable_chunked_prefill": "always on: prompt and answer so far of a moved request may exceed --max-num-tokens",
    "backend": "the PyTorch backend is the one whose traps are known",
    "max_beam_width": "beams cannot be streamed",
    "num_postprocess_workers": "results of such workers cannot be aborted in 1.2",
    "cache_transceiver_config": "prefill and decode in different workers is not supported",
    "batched_logits_processor": "it would run for every request of every client",
}
"""Fields that nobody may set, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtLlmConfig:
    """max_batch_size: how many requests run at a time; max_num_tokens: tokens computed in a step, of prompts too.

    max_seq_len: prompt and answer together; None: as many as the model was made for, SEQ_LEN_DEFAULT_MAX at most.
    extra: other arguments of `tensorrt_llm.LLM`, by their names there.

    warm_up_s: how long the first token of all may take. stall_s: how long nothing may come of an engine that has
    requests; silence_s: of one request while others go on; first_token_s: the same before its first token, while the
    prompts before it are computed. canary_after_s: how long an idle engine may say nothing before it has to make a
    token, within canary_s; probe_after_s: the same for one that has requests. abort_s: how long an aborted request is
    waited for; shutdown_s: the engine's end. loop_s: how long a call into the engine may hold up the event loop.
    """

    model: Path
    served_model_name: str
    tensor_parallel_size: int = 1
    max_batch_size: int = 64
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    kv_cache_free_gpu_memory_fraction: float = 0.9
    guided_decoding_backend: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    warm_up_s: float = 300.0
    stall_s: float = 60.0
    silence_s: float = 180.0
    first_token_s: float = 1800.0
    canary_after_s: float = 5.0
    canary_s: float = 20.0
    probe_after_s: float = 1.0
    abort_s: float = 2.0
    shutdown_s: float = 15.0
    loop_s: float = 30.0

    def __post_init__(self) -> None:
        assert self.max_batch_size >= 1
        check_extra(self.extra)
        if self.guided_decoding_backend is not None and self.extra.get("speculative_config") is not None:
            raise StartupError(
                "guided decoding and speculative decoding do not go together in TensorRT-LLM 1.2: leave out"
                " --guided-decoding-backend, or speculative_config in the file of --extra-llm-api-options"
            )

    @property
    def rank_count(self) -> int:
        """Data-parallel ranks within the engine."""
        return self.tensor_parallel_size if self.extra.get("enable_attention_dp") else 1

    @property
    def block_tokens(self) -> int:
        return int(self.extra.get("kv_cache_config", {}).get("tokens_per_block", BLOCK_TOKENS_DEFAULT))

    @property
    def has_stats(self) -> bool:
        """Whether the engine tells what it does, which costs it some of each step."""
        return bool(self.extra.get("enable_iter_perf_stats", True))


def llm_arguments(config: TrtLlmConfig, max_seq_len: int) -> dict[str, Any]:
    """Keyword arguments of `tensorrt_llm.LLM`.

    The engine's tokeniser stays away unless guided decoding makes its table of it: end ids are passed with each
    request, and text is the frontend's.
    """
    backend = config.guided_decoding_backend
    cache = {_FRACTION: config.kv_cache_free_gpu_memory_fraction, **config.extra.get("kv_cache_config", {})}
    arguments = {
        "enable_iter_perf_stats": True,
        **config.extra,
        "model": str(config.model),
        "skip_tokenizer_init": backend is None,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "max_seq_len": max_seq_len,
        "enable_chunked_prefill": True,
        "kv_cache_config": cache,
    }
    return arguments if backend is None else arguments | {"guided_decoding_backend": backend}


def read_extra(path: Path) -> dict[str, Any]:
    """The arguments in a file of YAML, or of JSON, which needs no library. Raises StartupError."""
    try:
        content = _parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise StartupError(f"--extra-llm-api-options {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--extra-llm-api-options {path} must hold names and values")
    check_extra(content)
    return content


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raises StartupError for what has a flag, and for what the worker cannot let be changed."""
    for name, flag in _FLAGS.items():
        if name in extra:
            raise StartupError(f"{name} in --extra-llm-api-options: give it by {flag}")
    for name, why in _OURS.items():
        if name in extra:
            raise StartupError(f"{name} in --extra-llm-api-options: leave it out, {why}")
    cache = extra.get("kv_cache_config", {})
    if not isinstance(cache, Mapping):
        raise StartupError("kv_cache_config in --extra-llm-api-options must hold names and values")
    if _FRACTION in cache:
        raise StartupError(
            f"kv_cache_config.{_FRACTION} in --extra-llm-api-options: give it by --kv-cache-free-gpu-memory-fraction"
        )


def _parsed(text: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError as not_json:
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError:
            raise ValueError(f"it is no JSON ({not_json}), and YAML needs PyYAML, which TensorRT-LLM brings") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
