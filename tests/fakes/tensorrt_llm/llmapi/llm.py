"""The LLM API."""

import atexit
import logging
import os
import socket
import time
import weakref
from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from .._fake.faults import Faults
from .._fake.model import Model
from .._fake.vocabulary import Vocabulary, load_vocabulary
from ..executor.proxy import GenerationExecutorProxy
from ..executor.request import GenerationRequest
from ..executor.result import GenerationResult
from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams
from .llm_args import TorchLlmArgs

_log = logging.getLogger("tensorrt_llm")

RequestOutput = GenerationResult

_NOT_PLAYED = (
    "bad",
    "logits_processor",
    "apply_batched_logits_processor",
    "use_beam_search",
    "prompt_logprobs",
    "return_context_logits",
    "return_generation_logits",
    "return_encoder_output",
    "return_perf_metrics",
    "additional_model_outputs",
    "lookahead_config",
    "truncate_prompt_tokens",
)
"""Fields of SamplingParams that the real package supports and the fake refuses."""


class BaseLLM:
    """The API. The constructor blocks while it loads. Raises ValueError for an unknown argument."""

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        **kwargs: Any,
    ) -> None:
        self._executor: GenerationExecutorProxy | None = None
        known = {field.name for field in fields(TorchLlmArgs)}
        if unknown := sorted(kwargs.keys() - known):
            raise ValueError(f"{type(self).__name__} got invalid argument: {unknown[0]}")
        self.args = TorchLlmArgs(
            model=str(model),
            tokenizer=tokenizer,
            tokenizer_mode=tokenizer_mode,
            skip_tokenizer_init=skip_tokenizer_init,
            trust_remote_code=trust_remote_code,
            tensor_parallel_size=tensor_parallel_size,
            dtype=dtype,
            revision=revision,
            tokenizer_revision=tokenizer_revision,
            **kwargs,
        )
        self._llm_id = f"{socket.gethostname()}-{os.getpid()}-{time.time_ns() // 10**6}"
        self._load(Faults.from_environment())
        atexit.register(_shutdown_if_alive, weakref.ref(self))

    def _load(self, faults: Faults) -> None:
        if self.args.skip_tokenizer_init and self.args.guided_decoding_backend is not None:
            raise ValueError(
                "guided decoding makes its table from the tokenizer, and skip_tokenizer_init leaves it out"
            )
        time.sleep(faults.load_s)
        if faults.load_error:
            raise RuntimeError(faults.load_error)
        vocabulary = load_vocabulary(str(self.args.tokenizer or self.args.model))
        self._tokenizer = None if self.args.skip_tokenizer_init else vocabulary
        self._executor = GenerationExecutorProxy(self.args, Model(vocabulary, faults.end_odds), faults)

    @property
    def tokenizer(self) -> Vocabulary | None:
        return self._tokenizer

    @property
    def llm_id(self) -> str:
        return self._llm_id

    def generate_async(
        self,
        inputs: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        lora_request: object | None = None,
        prompt_adapter_request: object | None = None,
        streaming: bool = False,
        kv_cache_retention_config: object | None = None,
        disaggregated_params: object | None = None,
        _postproc_params: object | None = None,
        scheduling_params: SchedulingParams | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """Submit a request; not a coroutine.

        Raises RuntimeError after a shutdown; ValueError for a prompt longer than max_num_tokens without chunked
        prefill, and for invalid parameters or ones without an end_id; and the error that the engine died of.
        """
        if any((lora_request, prompt_adapter_request, kv_cache_retention_config, disaggregated_params)):
            raise NotImplementedError("the fake does not play these arguments")
        if self._executor is None or self._executor.is_shutdown():
            raise RuntimeError("LLM is shutting down")
        params = self._prepared(SamplingParams() if sampling_params is None else sampling_params)
        token_ids = self._token_ids(inputs)
        self._check_length(len(token_ids))
        request = GenerationRequest(
            id=self._executor.next_id(),
            prompt_token_ids=token_ids,
            sampling_params=params,
            streaming=streaming,
            scheduling_params=scheduling_params,
            cache_salt=cache_salt,
        )
        self._log_clamp(request)
        return self._executor.submit(request)

    def get_stats(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """The statistics since the last call of this method or `get_stats_async`, which read the same queue."""
        return self._running.get_stats(timeout or 0.0)

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Always the same iterator, on the loop of the first request. Ends after `timeout` seconds of silence."""
        return self._running.aget_stats(timeout or 0.0)

    def get_kv_cache_events(self, timeout: float | None = 2) -> list[dict[str, Any]]:
        """Raises AssertionError before the first request."""
        return self._running.get_kv_events(timeout or 0.0)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterable[dict[str, Any]]:
        """Raises AssertionError before the first request."""
        return self._running.aget_kv_events(timeout or 0.0)

    @property
    def _running(self) -> GenerationExecutorProxy:
        if self._executor is None:
            raise RuntimeError("LLM is shutting down")
        return self._executor

    def shutdown(self) -> None:
        """Shut down. Waits for the engine's processes without a bound, so it may not return. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self) -> "BaseLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if getattr(self, "_executor", None) is not None:
            self.shutdown()

    def _prepared(self, params: SamplingParams) -> SamplingParams:
        """The caller's own object, with missing fields filled in."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams, got {type(params)}")
        if refused := [name for name in _NOT_PLAYED if getattr(params, name)]:
            raise NotImplementedError(f"the fake does not play {refused[0]}")
        if params.end_id is None:
            if self._tokenizer is None:
                raise ValueError(
                    "tokenizer is required to reset end_id if it is None, or you can explicitly specify it"
                )
            params._setup(self._tokenizer)
        params._stream_interval = self.args.stream_interval
        params._validate()
        return params

    def _token_ids(self, inputs: str | Sequence[int] | Mapping[str, Any]) -> list[int]:
        if isinstance(inputs, Mapping):
            inputs = inputs["prompt_token_ids"] if "prompt_token_ids" in inputs else inputs["prompt"]
        if isinstance(inputs, str):
            if self._tokenizer is None:
                raise ValueError("a text can't be read with skip_tokenizer_init")
            return self._tokenizer.encode(inputs)
        if not isinstance(inputs, list) or not isinstance(inputs[0], int):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        return list(inputs)

    def _check_length(self, prompt_length: int) -> None:
        limit = self.args.max_num_tokens
        if not self.args.enable_chunked_prefill and limit is not None and prompt_length > limit:
            raise ValueError(f"The prompt length ({prompt_length}) exceeds max_num_tokens ({limit})")

    def _log_clamp(self, request: GenerationRequest) -> None:
        limit, max_tokens = self.args.max_seq_len, request.sampling_params.max_tokens
        if limit and max_tokens and max_tokens > limit - len(request.prompt_token_ids):
            _log.warning("max_tokens (%d) is greater than what max_seq_len leaves; reducing it", max_tokens)


class LLM(BaseLLM):
    """The PyTorch backend."""


def _shutdown_if_alive(reference: "weakref.ref[BaseLLM]") -> None:
    llm = reference()
    if llm is not None:
        llm.shutdown()
