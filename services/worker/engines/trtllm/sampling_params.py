"""Maps a request to keyword arguments of TensorRT-LLM 1.2. Pure functions.

| request | arguments |
| --- | --- |
| token_ids, generated_token_ids | the prompt, as one list of ids |
| max_tokens, min_tokens | what is left of them after generated_token_ids |
| temperature 0, and its equals (`is_greedy`) | `top_k=1` alone: with none of the three the engine logs a warning |
| temperature, top_p, top_k | all three, because a missing one has another default |
| a temperature below TEMPERATURE_MIN | as temperature 0 |
| the model's end ids, stop.token_ids | `end_id`, `stop_token_ids`: the engine ends there, and the cursor checks too |
| ignore_eos | `ignore_eos`, and no end id among the stop ids |
| logprobs k | `logprobs` of at least 1, because 0 means none; the cursor drops the excess |
| logit_bias | a vector over the vocabulary |
| guided | GuidedDecodingParams; a choice becomes a regular expression |
| strings, n, choice, text, messages, parts | nothing: handled above the worker |
| seed, penalties, min_p | refused unless neutral: the sampler of 1.2 accepts and ignores them |

Raises INVALID_ARGUMENT for values that the engine would ignore or might crash on. `stop` is never passed: the engine
would search for stop strings by token ids of its own encoding.
"""

from dataclasses import dataclass
from typing import Any

from services.core.errors import invalid
from services.core.request import Guided, GuidedKind, Request, Sampling

TEMPERATURE_MIN = 0.01
"""Scores divided by much less are infinite in the engine's arithmetic, and sampling from them may crash the engine.
Below it, the likeliest token is taken, which is the limit. Source of the number: vLLM's sampling parameters.
"""
_META = frozenset(r"\.+*?()|[]{}^$")
"""The metacharacters of a regular expression. `re.escape` escapes more, which not every dialect accepts."""
_KINDS = {
    "xgrammar": tuple(GuidedKind),
    "llguidance": tuple(kind for kind in GuidedKind if kind is not GuidedKind.GRAMMAR),
}
"""The guided fields that each backend supports. Our grammars are in GBNF: xgrammar reads it, llguidance does not."""
_NEUTRAL: dict[str, float] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the mapping needs to know of the model.

    `end_ids`: the model's end tokens, the tokeniser's own first. `guided_backend`: None if guided decoding is off.
    """

    context_length: int
    vocab_size: int
    end_ids: tuple[int, ...]
    guided_backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments:
    """Arguments of `generate_async`.

    `sampling`: keyword arguments of SamplingParams, except for `guided`, keyword arguments of GuidedDecodingParams, and
    `bias`, pairs of a token and the value that `embedding_bias` adds to its score.
    """

    token_ids: list[int]
    sampling: dict[str, Any]
    guided: dict[str, Any] | None = None
    bias: tuple[tuple[int, float], ...] = ()


def guided_kinds(backend: str | None) -> tuple[GuidedKind, ...]:
    """The guided fields that a backend supports, for the model card."""
    return () if backend is None else _KINDS[backend]


def generate_arguments(request: Request, facts: ModelFacts) -> GenerateArguments:
    """Map a request that has tokens left to arguments. Raises Failure(INVALID_ARGUMENT)."""
    assert tokens_left(request, facts.context_length) > 0, "the request has no tokens left"
    _refuse_ignored(request.sampling)
    return GenerateArguments(
        token_ids=[*request.prompt_token_ids, *request.generated_token_ids],
        sampling={
            "detokenize": False,
            "max_tokens": tokens_left(request, facts.context_length),
            **_sampling(request.sampling, facts.vocab_size),
            **_stopping(request, facts.end_ids),
            **({} if request.logprobs is None else {"logprobs": max(request.logprobs, 1)}),
        },
        guided=None if request.guided is None else _guided(request, request.guided, facts.guided_backend),
        bias=request.sampling.logit_bias,
    )


def tokens_left(request: Request, context_length: int) -> int:
    """How many more tokens the answer may have."""
    by_limit = request.max_tokens - len(request.generated_token_ids)
    return max(0, min(by_limit, context_length - request.token_count))


def answer_end_ids(request: Request, end_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end this answer and are not part of it."""
    return frozenset(request.stop.token_ids + (() if request.stop.ignore_eos else end_ids))


def _refuse_ignored(sampling: Sampling) -> None:
    for name, neutral in _NEUTRAL.items():
        if getattr(sampling, name) != neutral:
            raise invalid(name, f"{name} has no effect in TensorRT-LLM 1.2: leave it out")
    if sampling.seed is not None and not sampling.is_greedy:
        raise invalid("seed", "TensorRT-LLM 1.2 ignores seeds: leave seed out, or set temperature to 0")


def _sampling(sampling: Sampling, vocab_size: int) -> dict[str, Any]:
    """The arguments that control how a token is drawn."""
    assert sampling.temperature is not None, "preprocess sets the temperature"
    if sampling.is_greedy or sampling.temperature < TEMPERATURE_MIN:
        return {"top_k": 1}
    top_k = sampling.top_k if sampling.top_k < vocab_size else 0
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k}


def _stopping(request: Request, end_ids: tuple[int, ...]) -> dict[str, Any]:
    """The arguments that control where the answer ends.

    `end_id` is always passed: without it, the engine would require a tokeniser.
    """
    first, *more = end_ids
    stop = request.stop
    stop_ids = sorted(answer_end_ids(request, end_ids) - (frozenset() if stop.ignore_eos else {first}))
    ending = {"end_id": first, "pad_id": first, "ignore_eos": stop.ignore_eos, "stop_token_ids": stop_ids or None}
    min_left = stop.min_tokens - len(request.generated_token_ids)
    if min_left > 0 and (stop_ids or not stop.ignore_eos):
        if stop_ids:
            raise invalid("min_tokens", _min_tokens_detail(stop.token_ids, more))
        ending["min_tokens"] = min_left
    return ending


def _min_tokens_detail(stop_ids: tuple[int, ...], more_ends: list[int]) -> str:
    other = "stop_token_ids" if stop_ids else f"the model's other end tokens {more_ends}"
    return f"TensorRT-LLM suppresses one end token until min_tokens, but not {other}: leave min_tokens out"


def _guided(request: Request, guided: Guided, backend: str | None) -> dict[str, Any]:
    """The arguments of guided decoding.

    Refuses `ignore_eos` and `min_tokens`: a suppressed end may leave a grammar without any token, which crashes the
    whole engine.
    """
    if guided.kind not in guided_kinds(backend):
        raise invalid("guided", f"this worker does not support guided.{guided.kind}: see --guided-decoding-backend")
    if request.stop.ignore_eos or request.stop.min_tokens > len(request.generated_token_ids):
        raise invalid(
            "guided", f"guided.{guided.kind} cannot be combined with ignore_eos or min_tokens here: leave them out"
        )
    match guided.kind:
        case GuidedKind.JSON_OBJECT:
            return {"json_object": True}
        case GuidedKind.JSON_SCHEMA:
            return {"json": guided.texts[0]}
        case GuidedKind.REGEX:
            return {"regex": guided.texts[0]}
        case GuidedKind.GRAMMAR:
            return {"grammar": guided.texts[0]}
        case GuidedKind.CHOICE:
            return {"regex": "(" + "|".join(map(_escaped, guided.texts)) + ")"}


def _escaped(text: str) -> str:
    return "".join(f"\\{character}" if character in _META else character for character in text)
