"""Requests to the engine, and its responses."""

from dataclasses import dataclass

from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams


@dataclass(slots=True)
class Logprob:
    """The log probability of one token. `rank`: 1 for the likeliest token."""

    logprob: float
    rank: int | None = None


LogprobResults = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request to the engine. `prompt_token_ids`: never empty. `id`: assigned by the engine."""

    id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    streaming: bool
    scheduling_params: SchedulingParams | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The output of steps for one sequence of a request.

    `token_ids`: the new tokens. `finish`: why the sequence has ended. `is_final`: the whole request has ended. `error`:
    the request has failed, and this is its last response.
    """

    id: int
    sequence_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish: str | None = None
    stop_reason: str | int | None = None
    cut_count: int = 0
    is_final: bool = False
    decoding_iter: int = 0
    cached_tokens: int = 0
    error: str | None = None
