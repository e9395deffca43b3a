"""The names that users import."""

from ..executor.result import CompletionOutput
from ..executor.utils import RequestError
from ..sampling_params import GuidedDecodingParams, SamplingParams
from ..scheduling_params import SchedulingParams
from .llm import LLM, RequestOutput
from .llm_args import KvCacheConfig, SchedulerConfig

__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "KvCacheConfig",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulingParams",
]
