"""The parts of TensorRT-LLM that our worker uses: names of modules, classes, functions and fields, and requirements.

To support another version than 1.2.1, update this manifest: each change here shows a change that the worker needs.
"""

from dataclasses import dataclass

VERSION = "1.2.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassUse:
    """The parts of one class that are used. All of them may come from a base class in the same file.

    `fields`: annotated in the class, or assigned in its methods. `methods`: `def`, including properties. `coroutines`:
    `async def`. `calls`: for each function, the keywords that we pass.
    """

    module: str
    name: str
    fields: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    coroutines: tuple[str, ...] = ()
    calls: tuple[tuple[str, tuple[str, ...]], ...] = ()


CLASSES = (
    ClassUse(
        module="llmapi/llm.py",
        name="BaseLLM",
        methods=("generate_async", "get_stats_async", "get_kv_cache_events_async", "shutdown"),
        calls=(
            ("__init__", ("model", "skip_tokenizer_init", "tensor_parallel_size", "kwargs")),
            ("generate_async", ("inputs", "sampling_params", "streaming", "scheduling_params")),
            ("get_stats_async", ("timeout",)),
        ),
    ),
    ClassUse(module="llmapi/llm.py", name="LLM"),
    ClassUse(
        module="llmapi/llm_args.py",
        name="TorchLlmArgs",
        fields=(
            "enable_attention_dp",
            "enable_chunked_prefill",
            "enable_iter_perf_stats",
            "guided_decoding_backend",
            "kv_cache_config",
            "max_batch_size",
            "max_num_tokens",
            "max_seq_len",
            "model",
            "skip_tokenizer_init",
            "tensor_parallel_size",
        ),
    ),
    ClassUse(
        module="llmapi/llm_args.py",
        name="KvCacheConfig",
        fields=("enable_block_reuse", "event_buffer_max_size", "free_gpu_memory_fraction", "tokens_per_block"),
    ),
    ClassUse(
        module="sampling_params.py",
        name="SamplingParams",
        fields=(
            "detokenize",
            "embedding_bias",
            "end_id",
            "guided_decoding",
            "ignore_eos",
            "logprobs",
            "max_tokens",
            "min_tokens",
            "pad_id",
            "stop_token_ids",
            "temperature",
            "top_k",
            "top_p",
        ),
    ),
    ClassUse(
        module="sampling_params.py",
        name="GuidedDecodingParams",
        fields=("grammar", "json", "json_object", "regex"),
    ),
    ClassUse(
        module="scheduling_params.py",
        name="SchedulingParams",
        fields=("attention_dp_rank", "attention_dp_relax"),
    ),
    ClassUse(
        module="executor/result.py",
        name="CompletionOutput",
        fields=("finish_reason", "index", "logprobs", "stop_reason", "token_ids"),
    ),
    ClassUse(
        module="executor/result.py",
        name="GenerationResult",
        fields=("cached_tokens", "decoding_iter"),
        methods=("__aiter__", "abort", "finished", "outputs", "request_id"),
        coroutines=("__anext__", "aresult"),
    ),
    ClassUse(
        module="executor/result.py",
        name="IterationResult",
        methods=("__aiter__",),
        coroutines=("__anext__",),
    ),
    ClassUse(module="executor/utils.py", name="RequestError"),
)

EXPORTS = {
    "__init__.py": ("LLM", "SamplingParams", "__version__"),
    "llmapi/__init__.py": ("GuidedDecodingParams",),
}
"""Names that we import from a package and not from the module that defines them."""

REQUIREMENTS = (
    "aiohttp>=3.13.3",
    "etcd-sdk-python==0.0.7",
    "fastapi>=0.120.1,<=0.121.3",
    "llguidance==0.7.29",
    "numpy<2",
    "prometheus_client",
    "protobuf>=6.33.5",
    "pydantic>=2.9.1",
    "starlette>=0.49.1",
    "transformers==4.57.3",
    "urllib3>=2.6.3",
    "xgrammar==0.1.32",
    # Indirect requirements:
    "grpcio>=1.66.2,<=2",  # etcd-sdk-python 0.0.7
    "tokenizers>=0.22.0,<=0.23.0",  # transformers 4.57.3
)
"""The requirements of 1.2.1 that may conflict with ours. Source: its metadata on PyPI, which has no wheel."""

PYTHONS = ("3.10", "3.12")
"""The Python versions of its wheels."""
