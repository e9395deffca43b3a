"""The arguments of the constructor: names and defaults. The fake ignores almost all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Config = TypeVar("Config")


@dataclass(kw_only=True)
class KvCacheConfig:
    """The key-value cache. `event_buffer_max_size`: how many of its events are kept for a reader; 0: none."""

    enable_block_reuse: bool = True
    max_tokens: int | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    dtype: str = "auto"
    tokens_per_block: int = 32


@dataclass(kw_only=True)
class SchedulerConfig:
    """The order of requests. The fake supports only the default of the first field: answers are never paused."""

    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"
    context_chunking_policy: str | None = None
    dynamic_batch_config: object | None = None


def _made(kind: type[Config], value: Config | Mapping[str, Any]) -> Config:
    """Convert a dict to the configuration."""
    if not isinstance(value, Mapping):
        return value
    try:
        return kind(**value)
    except TypeError as error:
        raise ValueError(f"1 validation error for {kind.__name__}: {error}") from None


@dataclass(kw_only=True)
class TorchLlmArgs:
    """The arguments of LLM for the PyTorch backend. The engine chooses those that are None, unseen by the parent."""

    model: str
    tokenizer: Any = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    revision: str | None = None
    tokenizer_revision: str | None = None
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    moe_tensor_parallel_size: int | None = None
    moe_expert_parallel_size: int | None = None
    gpus_per_node: int | None = None
    enable_lora: bool = False
    lora_config: object | None = None
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    guided_decoding_backend: str | None = None
    batched_logits_processor: object | None = None
    iter_stats_max_iterations: int | None = None
    request_stats_max_iterations: int | None = None
    speculative_config: object | None = None
    max_batch_size: int | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    max_beam_width: int | None = None
    max_num_tokens: int | None = 8192
    load_format: str = "auto"
    enable_tqdm: bool = False
    stream_interval: int = 1
    backend: str | None = None
    enable_attention_dp: bool = False
    attention_dp_config: object | None = None
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache_transceiver_config: object | None = None
    sampler_type: str = "auto"
    disable_overlap_scheduler: bool = False
    attn_backend: str = "TRTLLM"
    cuda_graph_config: object | None = None
    enable_iter_perf_stats: bool = False
    enable_iter_req_stats: bool = False
    return_perf_metrics: bool = False
    perf_metrics_max_requests: int = 0
    print_iter_log: bool = False
    num_postprocess_workers: int = 0
    postprocess_tokenizer_dir: str | None = None
    reasoning_parser: str | None = None
    batch_wait_timeout_ms: float = 0
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0
    kv_connector_config: object | None = None
    orchestrator_type: str | None = None
    garbage_collection_gen0_threshold: int = 20000
    fail_fast_on_attention_window_too_large: bool = False

    def __post_init__(self) -> None:
        self.kv_cache_config = _made(KvCacheConfig, self.kv_cache_config)
        self.scheduler_config = _made(SchedulerConfig, self.scheduler_config)
        if self.guided_decoding_backend not in (None, "xgrammar", "llguidance"):
            raise ValueError(f"guided_decoding_backend: got {self.guided_decoding_backend!r}")
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "tensor_parallel_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name}: Input should be a positive integer, got {value!r}")
