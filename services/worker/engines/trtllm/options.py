"""The settings of TensorRT-LLM: flags, and a file for everything that has no flag.

Every setting that requests depend on is passed explicitly. If the engine chose it, it would do so in another process,
and the worker would not learn the value: see `max_seq_len`.
"""

import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.process import StartupError

BLOCK_TOKENS_DEFAULT = 32
"""Tokens in a block of the key-value cache, unless the file sets another value."""
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
    "skip_tokenizer_init": "the worker sets it, because guided decoding needs the engine's tokeniser",
    "enable_chunked_prefill": "it is always on, because a moved request may be longer than --max-num-tokens",
    "backend": "only the PyTorch backend is supported",
    "max_beam_width": "beams cannot be streamed",
    "num_postprocess_workers": "results of such workers cannot be aborted in 1.2",
    "cache_transceiver_config": "prefill and decode in different workers is not supported",
    "batched_logits_processor": "it would run for every request of every client",
}
"""Fields that the file must not set, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtLlmConfig:
    """Settings of the TensorRT-LLM engine.

    `max_batch_size`: how many requests run at a time. `max_num_tokens`: tokens computed in a step, including prompts.
    `max_seq_len`: tokens of prompt and answer; None: as many as the model supports, at most SEQ_LEN_DEFAULT_MAX.
    `extra`: other arguments of `tensorrt_llm.LLM`, by their names there.

    Bounds on waiting, in seconds. `warm_up_s`: for the very first token. `stall_s`: for any token of an engine that has
    requests. `silence_s`: for the next result of one request while others continue; `first_token_s`: the same before
    its first token, while earlier prompts are computed. `canary_after_s`: how long an idle engine may be silent before
    it has to make a token, which may take `canary_s`; `probe_after_s`: the same for an engine that has requests.
    `abort_s`: for the last result of an aborted request. `shutdown_s`: for the engine's shutdown. `loop_s`: how long a
    call into the engine may block the event loop.
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
                "guided decoding and speculative decoding cannot be combined in TensorRT-LLM 1.2: leave out"
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
        """Whether the engine reports statistics, which takes some time of each step."""
        return bool(self.extra.get("enable_iter_perf_stats", True))


def llm_arguments(config: TrtLlmConfig, max_seq_len: int) -> dict[str, Any]:
    """Keyword arguments of `tensorrt_llm.LLM`.

    The engine loads its tokeniser only for guided decoding: end ids are passed with each request, and text is handled
    by the frontend.
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
    """Read arguments from a YAML or JSON file. Raises StartupError. JSON needs no additional library."""
    try:
        content = _parsed(path.read_text())
    except (OSError, ValueError) as error:
        raise StartupError(f"--extra-llm-api-options {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise StartupError(f"--extra-llm-api-options {path} must contain a mapping of names to values")
    check_extra(content)
    return content


def check_extra(extra: Mapping[str, Any]) -> None:
    """Raise StartupError for arguments that have a flag, and for those that only the worker may set."""
    for name, flag in _FLAGS.items():
        if name in extra:
            raise StartupError(f"{name} in --extra-llm-api-options: use {flag} instead")
    for name, why in _OURS.items():
        if name in extra:
            raise StartupError(f"{name} in --extra-llm-api-options: leave it out: {why}")
    cache = extra.get("kv_cache_config", {})
    if not isinstance(cache, Mapping):
        raise StartupError("kv_cache_config in --extra-llm-api-options must be a mapping of names to values")
    if _FRACTION in cache:
        raise StartupError(
            f"kv_cache_config.{_FRACTION} in --extra-llm-api-options: use --kv-cache-free-gpu-memory-fraction instead"
        )


def _parsed(text: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError as not_json:
        try:
            yaml: Any = importlib.import_module("yaml")
        except ImportError:
            raise ValueError(f"it is not JSON ({not_json}), and YAML needs PyYAML, a part of TensorRT-LLM") from None
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(str(error)) from error
