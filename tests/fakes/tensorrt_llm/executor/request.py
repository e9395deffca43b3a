"""What goes to the engine and what comes back."""

from dataclasses import dataclass

from ..sampling_params import SamplingParams
from ..scheduling_params import SchedulingParams


@dataclass(slots=True)
class Logprob:
    """rank: 1 for the likeliest."""

    logprob: float
    rank: int | None = None


LogprobResults = list[dict[int, Logprob]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """prompt_token_ids: never empty. id: the engine's own."""

    id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    streaming: bool
    scheduling_params: SchedulingParams | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What steps did for one sequence of a request. error: the request has failed, and this is the last of it.

    token_ids: new ones. finish: why this sequence ended. is_final: so has the whole request.
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
